# SPDX-License-Identifier: Apache-2.0
"""What all tests have in common."""

from hypothesis import HealthCheck, settings

# How long it takes to draw an example, and to try it, says something of the machine alone.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
