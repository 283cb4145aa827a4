# SPDX-License-Identifier: Apache-2.0
"""``make gpu-bench``: vLLM as it comes against our methods, on a GPU, in parts.

A part is one engine that has the whole GPU to itself. What it measured is kept in a file of its
own, so that an interrupted run goes on where it stopped. ``vllm-spec bench`` has all engines up at
once and lets them take turns, which is the fairer comparison where they fit; on a GPU that takes
each of them a part of the memory.
"""
