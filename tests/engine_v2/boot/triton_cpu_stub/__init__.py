# SPDX-License-Identifier: Apache-2.0
"""A Triton backend "cpu" that compiles nothing: kernels run in Triton's interpreter.

vLLM 0.32 has the CPU side of its V2 model runner (``v1/worker/cpu/shm.py``), and uses it where
Triton has a backend of this name (``triton_utils/importing.py``). Stock Triton has none. With this
one, found by its entry point in the folder beside, and ``TRITON_INTERPRET=1``, the stock wheels run
the V2 runner on a CPU: slowly, and well enough for tests on tiny models. What it cannot show is
what runs at the same time on a GPU: streams, events, buffers in flight, CUDA graphs.
"""
