# SPDX-License-Identifier: Apache-2.0
"""From the user's JSON to a running engine: configuration, limits, platform."""
