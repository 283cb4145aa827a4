# SPDX-License-Identifier: Apache-2.0
"""A request's own options: checked at the door, kept while it runs."""
