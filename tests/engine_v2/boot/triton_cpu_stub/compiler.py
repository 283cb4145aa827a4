# SPDX-License-Identifier: Apache-2.0
"""The compiler that Triton expects of a backend; never asked to compile."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend


class CPUBackend(BaseBackend):
    """Refuses everything: kernels are interpreted."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """The target of :class:`.driver.CPUDriver`."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Name of this backend in Triton's cache."""
        return "triton_cpu_stub"

    def parse_options(self, options: dict[str, Any]) -> object:
        """Not compiled."""
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def add_stages(self, stages: Any, options: Any, language: Any = None) -> None:
        """Not compiled."""
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        """Not compiled."""
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def get_module_map(self) -> dict[str, ModuleType]:
        """No device functions."""
        return {}
