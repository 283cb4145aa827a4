# SPDX-License-Identifier: Apache-2.0
"""The driver that Triton expects of a backend: the CPU, always there."""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    """The only active driver on a machine without a GPU."""

    @classmethod
    def is_active(cls) -> bool:
        """Always."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Nothing is compiled."""
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def get_current_target(self) -> GPUTarget:
        """A CPU."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        """A CPU."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Interpreted kernels are not tuned."""
        raise NotImplementedError("set TRITON_INTERPRET=1")
