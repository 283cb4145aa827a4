# SPDX-License-Identifier: Apache-2.0
"""Which methods can be trained, and where their trainers are. Imports none of them."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_spec_ext.training.schema import Training


@dataclass(frozen=True)
class Trainer:
    """A method's entry: what is needed to offer it, without loading torch."""

    settings: str  # "module:Class", a Training
    run: str  # "module:function" of (settings, report)
    summary: str  # for the command line's help

    def load_settings(self) -> type[Training]:
        """Its settings class; loads no torch."""
        return _load(self.settings)

    def load_run(self) -> Callable[[Any, Callable[[str], None]], Any]:
        """What trains; loads torch."""
        return _load(self.run)


_HERE = "vllm_spec_ext.training"
TRAINERS = {
    "blockwise": Trainer(
        f"{_HERE}.blockwise.schema:BlockwiseTraining",
        f"{_HERE}.blockwise.trainer:train_blockwise",
        "Train heads for blockwise parallel decoding, from prompts to a folder to serve.",
    ),
    "draft": Trainer(
        f"{_HERE}.draft.schema:DraftTraining",
        f"{_HERE}.draft.trainer:train_draft",
        "Cut a small draft model from a target and distil it on the target's answers.",
    ),
    "nar": Trainer(
        f"{_HERE}.nar.schema:NarTraining",
        f"{_HERE}.nar.trainer:train_nar",
        "Train a block drafter: several tokens in one pass over the target's hidden states.",
    ),
}
"""Method -> its trainer. A further method is a folder beside ``blockwise/`` and an entry here."""


def _load(path: str) -> Any:
    return pkgutil.resolve_name(path)
