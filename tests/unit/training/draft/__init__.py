# SPDX-License-Identifier: Apache-2.0
"""A package, so that its conftest is told apart from the one of the engine tests."""
