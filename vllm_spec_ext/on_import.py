# SPDX-License-Identifier: Apache-2.0
"""Change a module of vLLM's once somebody imports it, without importing it for that."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, action: Callable[[ModuleType], object]) -> None:
    """Do something with a module now if it is here, else right after its first import.

    Args:
        name: Of the module.
        action: Asked for again before that import, it runs once all the same.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    elif not any(
        isinstance(each, _Waiting) and each.of == (name, action) for each in sys.meta_path
    ):
        sys.meta_path.insert(0, _Waiting(name, action))


class _Waiting(MetaPathFinder):
    """Gets out of the way once its module was imported; others may look for it before."""

    def __init__(self, name: str, action: Callable[[ModuleType], object]) -> None:
        self.of = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name, action = self.of
        if fullname != name:
            return None
        sys.meta_path.remove(self)  # or it would be asked again by this
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)

        def act(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                action(module)

        if spec is not None and spec.loader is not None:
            spec.loader = _ThenActing(spec.loader, act)
        return spec


class _ThenActing(Loader):
    def __init__(self, loader: Loader, action: Callable[[ModuleType], object]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)
