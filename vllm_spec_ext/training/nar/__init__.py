# SPDX-License-Identifier: Apache-2.0
"""The ``nar`` drafter in plain torch: the module that is trained, and the reference for tests."""
