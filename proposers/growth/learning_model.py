# SPDX-License-Identifier: Apache-2.0
"""Methods with one draft model can learn while they serve (``online``): its weights are exchanged.

An exchange takes about as long as a step of the target, and the model forgets its KV, so versions
take turns of many steps, not of single ones.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.growth.checkpoint_files import (
    checkpoint_files,
    checkpoint_folder,
    read_tensors,
)
from vllm_spec_ext.proposers.growth.tree_drafting import TreeDrafting

if TYPE_CHECKING:
    from torch import Tensor

_MAY_BE_TIED = "lm_head.weight"  # and left out by one who writes it


class OneModelLearns(TreeDrafting):
    """See :class:`vllm_spec_ext.proposers.base.Learns`."""

    steps_a_turn = 64

    _weight_shapes: "dict[str, tuple[int, ...]] | None" = (
        None  # of the first weights that were read
    )

    @classmethod
    def drafter_folder(cls, options: MethodOptions) -> Path:
        """Where the model is.

        Raises:
            SpecExtError: There are several models, or it is none that can be trained.
        """
        specs = cls.models(options)
        if len(specs) != 1:
            raise SpecExtError(
                f"online: {cls.info.name} has {len(specs)} draft models, expected one: a version "
                "is one model's weights. Name one model, or leave online out"
            )
        if specs[0].quantization is not None:
            raise SpecExtError(
                f"online: quantization is {specs[0].quantization!r}, expected none: what is "
                "trained are plain weights. Leave quantization out, or online"
            )
        return checkpoint_folder(specs[0].model)

    @classmethod
    def drafter_files(cls, options: MethodOptions) -> Mapping[str, bytes]:
        """The model's configuration and weights; raises as :meth:`drafter_folder`."""
        return checkpoint_files(cls.drafter_folder(options))

    def read_weights(self, folder: Path) -> "dict[str, Tensor]":
        """Weights of the same names and shapes; raises SpecExtError for others."""
        found = read_tensors(folder)
        shapes = {name: tuple(value.shape) for name, value in found.items()}
        if self._weight_shapes is None:
            self._weight_shapes = shapes
        names = [*shapes, *(self._weight_shapes.keys() - {_MAY_BE_TIED})]
        other = [name for name in names if shapes.get(name) != self._weight_shapes.get(name)]
        if other:
            raise SpecExtError(
                f"the weights in {folder} do not match the draft model: {other[0]} has the shape "
                f"{shapes.get(other[0])}, expected {self._weight_shapes.get(other[0])}"
            )
        return found

    def use_weights(self, weights: object) -> None:
        """Draft with these; on all ranks."""
        self._models[0].reload(cast("dict[str, Tensor]", weights).items())
