# SPDX-License-Identifier: Apache-2.0
"""Takes work out of Triton's interpreter that gives the same every time, or that nobody reads.

For blocks of a few hundred numbers nearly all its time goes into describing types: each operation
makes the type of its result anew, shape by shape and name by name. What kernels compute is
untouched.
"""

import dataclasses
from typing import Any


def register() -> None:
    """Patch the interpreter; before its first launch."""
    _keep_shapes()
    _know_types_by_name()
    _call_built_in_functions_directly()
    _leave_out_overflow_checks()


def _keep_shapes() -> None:
    """Types and tensors of one shape share what follows from it."""
    from triton._utils import validate_block_shape
    from triton.language import core

    known: dict[
        tuple[int, ...], Any
    ] = {}  # as of block_type: a tuple of numbers, and their product
    of_tensors: dict[int, tuple[Any, ...]] = {}  # by the identity of what is in `known`

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        if id(shape) not in of_tensors:
            sizes = tuple(core._unwrap_shape(shape))
            if not sizes:
                raise TypeError("0d block_type is forbidden")
            if sizes not in known:
                validate_block_shape(sizes)
                known[sizes] = core.tuple(sizes)
                numel = 1
                for size in sizes:
                    numel *= size
                constants = core.tuple([core.constexpr(size) for size in sizes])
                of_tensors[id(known[sizes])] = numel, core.constexpr(numel), constants
            shape = known[sizes]
        self.shape = shape
        self.numel = of_tensors[id(shape)][0]

    def name(self: Any) -> str:
        return f"<{self.shape}, {self.element_ty}>"

    no_shape = core.constexpr(1), core.tuple([])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = of_tensors[id(type.shape)][1:] if type.is_block() else no_shape

    core.block_type.__init__ = init_block_type
    core.block_type.name = property(name)  # for messages
    core.tensor.__init__ = init_tensor


def _know_types_by_name() -> None:
    """Questions about a type, without making the lists of all types first."""
    from triton.language import core
    from triton.runtime import interpreter

    of_numpy = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get_np_dtype(of_triton: Any) -> Any:
        scalar = of_triton.scalar
        if scalar.name not in known:
            known[scalar.name] = of_numpy(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = get_np_dtype
    whole = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    core.dtype.is_int = lambda self: not self.is_block() and self.name in whole
    core._unwrap_if_constexpr = _unwrapping(core)


def _unwrapping(core: Any) -> Any:
    usual = core._unwrap_if_constexpr
    plain = frozenset({core.tensor, core.dtype, core.block_type, core.pointer_type, int, float})

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else usual(value)

    return unwrap


def _call_built_in_functions_directly() -> None:
    """Without the wrapper that asks whether a kernel calls, as only kernels do here."""
    from triton.runtime import interpreter

    def patch_attr(where: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)
        semantic = interpreter.interpreter_semantic

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*arguments, **named)

        scope.set_attr(where, name, call)

    interpreter._patch_attr = patch_attr


def _leave_out_overflow_checks() -> None:
    """Their outcome is dropped where Triton does not debug (``TritonSemantic.device_assert``)."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    if not options.debug:
        interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
