# SPDX-License-Identifier: Apache-2.0
"""Settings of ``vllm-spec train blockwise``: the heads' own beside those of every method."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.schema import FREE_TO_CHANGE as ALWAYS_FREE
from vllm_spec_ext.training.schema import Training

# What the paper did, where it differs from our defaults (Stern et al. 2018, sec. 4 and 6).
PAPER: dict[str, Any] = {
    "condition_on_next": False,
    "copy_match": 0,
    "block_diagonal": False,
    "loss": "random",
}


class BlockwiseTraining(Training):
    """Settings of ``vllm-spec train blockwise``."""

    product: ClassVar[str] = "heads"

    preset: Literal["default", "paper"] = "default"
    """``paper`` sets what the paper used for every setting that is not given."""

    # Heads
    num_heads: int = Field(default=4, ge=1, le=32)
    """Heads to train = draft tokens in a row. The paper's k counts the target too: k = this + 1."""

    head_width: int | None = Field(default=None, ge=1, le=1 << 20)
    """Hidden units per head. Default: as many as keep all heads within 12 * hidden_size**2
    parameters, about one Transformer layer (8 MB in bf16 for a hidden size of 576)."""

    block_diagonal: bool = False
    """A private hidden layer for each head; far smaller than the paper's for large models."""

    condition_on_next: bool = True
    """Show the heads the token that the target itself emits; the hidden state does not know it."""

    copy_match: int = Field(default=8, ge=0, le=64)
    """Show the heads the tokens that followed the latest place where the end of the text occurred
    before, compared over up to this many tokens; 0 = do not. Small models repeat their prompt and
    themselves, and their hidden state does not hold what they will repeat."""

    draft_vocab: int | None = Field(default=None, ge=1)
    """Let the heads draft only this many tokens, the most frequent of the data. The vocabulary
    projection is most of the cost of training and of drafting; rare tokens are seldom drafted
    rightly anyway (FR-Spec, Zhao et al. 2025). Default: all tokens."""

    # Optimisation
    loss: Literal["random", "all"] = "random"
    """Train one random head per batch (the paper's way, cheaper) or all of them."""

    finetune: bool = False
    """Train the target as well. It is then another model, saved in RUN_DIR/model, and what it
    writes differs from the original's."""

    target_learning_rate: float = Field(default=2e-5, gt=0.0, allow_inf_nan=False)
    """Peak learning rate of the target with ``finetune``."""

    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, allow_inf_nan=False)
    """Part of the hidden units that are left out of a training step, against learning a small data
    set by heart."""

    # Evaluation
    tree_nodes: int = Field(default=16, ge=1, le=256)
    """Node budget of the draft trees measured at the end."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("preset") == "paper":
            return {**PAPER, **given}
        return given

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.finetune and self.cache_hidden:
            raise ValueError("cache_hidden keeps states of a frozen target; drop it or finetune")
        if self.max_length < self.num_heads + 3:
            raise ValueError(
                f"max_length={self.max_length} has no room for {self.num_heads} heads; raise it"
            )
        return self

    @property
    def trains_target(self) -> bool:
        """Whether the target's weights change."""
        return self.finetune

    @property
    def tuned_model(self) -> Path:
        """Where ``finetune`` leaves the target."""
        return self.run_folder / "model"

    def target_to_load(self) -> str:
        """Finished heads that were trained with the target are measured on that one.

        Raises:
            SpecExtError: There is none.
        """
        if self.dry_run or self.stage != "eval" or not self.finetune:
            return self.model
        if not self.tuned_model.is_dir():
            raise SpecExtError(
                f"no {self.tuned_model}; --stage eval --finetune measures the heads on the target "
                "that was trained with them. Give the --out and --run-dir of that run, or drop "
                "--finetune"
            )
        return str(self.tuned_model)


FREE_TO_CHANGE = ALWAYS_FREE | {"tree_nodes"}
