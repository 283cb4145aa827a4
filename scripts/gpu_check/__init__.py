# SPDX-License-Identifier: Apache-2.0
"""``make gpu-check``: what only a GPU can show, in under ten minutes, as one JSON.

A check is a function of a :class:`~gpu_check.site.Site`; it returns what it found, and raises
:class:`~gpu_check.site.CheckFailed`. Each runs in a process of its own, which gives the GPU's
memory back when it ends. :mod:`gpu_check.catalogue` lists them.
"""
