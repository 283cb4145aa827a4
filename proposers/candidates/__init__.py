# SPDX-License-Identifier: Apache-2.0
"""Next-token candidates of several sources in one tree: looked up, calibrated, best first."""
