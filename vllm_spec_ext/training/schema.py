# SPDX-License-Identifier: Apache-2.0
"""Settings of every training run, whatever is trained: data, schedule, output.

A method's own settings class adds what only it has (``training/METHOD/schema.py``). These classes
are the only source of a run's flags, its config file and its docs.
"""

import os
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from vllm_spec_ext.options import Options


class Training(Options):
    """What the training of every method has."""

    product: ClassVar[str] = "weights"
    """What comes out, for messages; a plural."""

    model: str
    """Target model: Hugging Face name or folder."""

    target_name: str | None = None
    """Name of the target to write into the result, where MODEL is a local folder."""

    out: Path
    """Folder for the result, which is served from there."""

    run_dir: Path | None = None
    """Folder for all else of the run: data, state, logs. Default: OUT with ``.run`` added."""

    stage: Literal["all", "data", "train", "eval"] = "all"
    """Run one stage only: make the training data, train, or measure a finished result."""

    resume: Literal["auto", "require", "restart"] = "auto"
    """Go on from the run folder's state if there is one, insist on one, or start over."""

    dry_run: bool = False
    """Measure a few batches, print the expected time and disk use, write nothing."""

    # Data
    prompts: list[Path] = Field(default_factory=list)
    """Prompt files: .jsonl (one object a line), .json (one array) or text (one prompt a line), also
    .gz."""

    field: str = Field(default="prompt", min_length=1)
    """Where a .jsonl line has its prompt: ``prompt``, ``question``, ``turns[0]``; several names,
    separated by commas, for files of different shapes."""

    data: Path | None = None
    """Token shards: read if they are complete, made otherwise. Default: RUN_DIR/data."""

    raw_text: bool = False
    """Train on the text of the prompt files itself instead of on the target's continuations."""

    chat: Literal["auto", "always", "never"] = "auto"
    """Wrap prompts in the target's chat template; ``auto`` does if it has one."""

    generator: Literal["vllm", "transformers"] = "vllm"
    """Who generates the continuations; ``transformers`` works where vLLM is not installed."""

    generate_batch: int = Field(default=256, ge=1)
    """Prompts that ``transformers`` continues at the same time; vLLM decides by itself."""

    max_prompts: int | None = Field(default=None, ge=1)
    """Use only this many prompts, drawn at random from all files."""

    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Leave out longer prompts, and those that leave no room for two more tokens within
    ``max_length``."""

    max_new_tokens: int = Field(default=256, ge=2)
    """Longest continuation."""

    temperature: float = Field(default=0.0, ge=0.0, le=5.0, allow_inf_nan=False)
    """Sample the continuations at this temperature; 0 = greedy, as the paper decodes."""

    prompts_per_shard: int = Field(default=256, ge=1)
    """Prompts generated and saved together; an interrupted generation loses at most these."""

    cache_hidden: bool = False
    """Keep the target's hidden states on disk instead of computing them anew in every epoch. Where
    those of new tokens are all that is needed, vLLM records them while it generates."""

    cache_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of hidden states kept on disk; ``auto`` is the target's own."""

    # Optimisation
    epochs: float = Field(default=4.0, gt=0.0, le=1e6, allow_inf_nan=False)
    """Passes over the data."""

    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many batches instead."""

    batch_size: int = Field(default=32, ge=1)
    """Sequences per batch."""

    max_length: int = Field(default=512, ge=8)
    """Cut sequences to this many tokens."""

    positions_per_sequence: int = Field(default=64, ge=0)
    """Random positions of each sequence that enter a batch's loss; 0 = all. The vocabulary
    projection is most of the cost, and neighbouring positions teach much the same."""

    prompt_text: bool = False
    """Learn from the text of the prompts too, not only from the continuations. Their hidden states
    are computed anyway; it helps where there are few continuations."""

    logit_chunk: int = Field(default=2048, ge=1)
    """Positions whose logits exist at the same time; bounds memory, changes no result."""

    learning_rate: float = Field(default=1e-3, gt=0.0, allow_inf_nan=False)
    """Peak learning rate of what is trained."""

    warmup: float = Field(default=0.05, ge=0.0, lt=1.0, allow_inf_nan=False)
    """Part of all steps with a rising learning rate; a cosine to zero follows."""

    weight_decay: float = Field(default=0.01, ge=0.0, allow_inf_nan=False)
    """AdamW weight decay of the trained matrices."""

    clip: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Largest gradient norm."""

    seed: int = Field(default=0, ge=0)
    """Seed of order, positions and initial weights."""

    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Arithmetic of the frozen target and of the products; ``auto`` is bf16 on a GPU, else fp32."""

    device: str = "auto"
    """``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:0``."""

    # Evaluation, reporting, output
    eval_sequences: int = Field(default=200, ge=1)
    """Held-out sequences; at most a tenth of the data."""

    eval_every: int = Field(default=500, ge=1)
    """Steps between measurements on held-out sequences."""

    save_every: int = Field(default=200, ge=1)
    """Steps between saved states."""

    log_every: int = Field(default=20, ge=1)
    """Steps between progress lines."""

    save_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Number format of the result."""

    push_to_hub: str | None = None
    """Upload the result to this Hugging Face Hub repository, e.g. ``user/heads``."""

    @field_validator("prompts", mode="before")
    @classmethod
    def _list_of_one(cls, given: Any) -> Any:
        return [given] if isinstance(given, str | Path) else given

    # A config file has no shell to expand `~`.
    @field_validator("out", "run_dir", "data")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        return path and Path(os.path.expanduser(path))

    @field_validator("prompts")
    @classmethod
    def _expand_prompts(cls, paths: list[Path]) -> list[Path]:
        return [Path(os.path.expanduser(path)) for path in paths]

    @field_validator("model")
    @classmethod
    def _expand_model(cls, name: str) -> str:
        return os.path.expanduser(name)  # no name on the Hub starts with one

    @field_validator("push_to_hub")
    @classmethod
    def _check_repository(cls, name: str | None) -> str | None:
        if name is not None:  # now, and not after hours of training
            from huggingface_hub.utils import validate_repo_id

            validate_repo_id(name)
            if name.count("/") != 1:
                raise ValueError("expected 'user/name'")
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.raw_text and self.temperature > 0.0:
            raise ValueError("raw_text generates nothing, so temperature has no meaning; drop one")
        if self.raw_text and self.chat == "always":
            raise ValueError("raw_text takes the text as it is, without a chat template; drop one")
        if self.push_to_hub and self.stage in ("data", "eval"):
            raise ValueError(
                f"stage={self.stage!r} makes no {self.product} that push_to_hub could upload; "
                "drop one"
            )
        if self.run_dir is None and self.out.name in ("", ".."):
            raise ValueError(
                f"out is {str(self.out)!r}, and the run's folder would have no name beside it; "
                f"name a folder for the {self.product}, e.g. --out {self.product}, or give "
                "--run-dir"
            )
        return self

    @property
    def records_states(self) -> bool:
        """Whether the hidden states are written down while the data is generated."""
        generates = not self.raw_text and self.generator == "vllm"
        return generates and self.cache_hidden and not self.whole_texts

    @property
    def whole_texts(self) -> bool:
        """Whether states of the prompts are needed, too, and not only those of new tokens."""
        return self.prompt_text

    def state_layers(self, num_layers: int) -> tuple[int, ...] | None:
        """Which states of a target of so many layers are needed; None = the final ones alone."""
        return None

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt whose continuation can be learned from."""
        return min(self.max_prompt_tokens, self.max_length - 2)

    @property
    def shown_target(self) -> str:
        """The target as people know it."""
        return self.target_name or self.model

    @property
    def run_folder(self) -> Path:
        """Where state, logs and (by default) data are."""
        return self.run_dir or self.out.with_name(self.out.name + ".run")

    @property
    def kept_folders(self) -> list[tuple[str, Path]]:
        """By option: what the result may not take the place of."""
        kept = [("--run-dir", self.run_folder), ("--data", self.data_folder)]
        model = Path(self.model).expanduser()
        return [*kept, ("--model", model)] if model.is_dir() else kept

    @property
    def writes_result(self) -> bool:
        """Whether there will be a new result in ``out``."""
        return self.stage in ("all", "train") and not self.dry_run

    @property
    def trains_target(self) -> bool:
        """Whether the target's own weights change, too."""
        return False

    def target_to_load(self) -> str:
        """The target of the stages after the data's; raises SpecExtError where there is none."""
        return self.model

    @property
    def data_folder(self) -> Path:
        """Where the token shards are."""
        return self.data or self.run_folder / "data"


# A resumed run may differ in these, and in those that a method adds; everything else would make it
# another run. What decides on the data is not compared by name: the state remembers a hash of the
# data itself, TokenData's.
FREE_TO_CHANGE = frozenset(
    {
        *("out", "run_dir", "stage", "resume", "dry_run", "push_to_hub", "save_dtype"),
        *("target_name", "prompts", "data", "generator", "generate_batch", "prompts_per_shard"),
        *(
            "cache_hidden",
            "cache_dtype",
            "field",
            "raw_text",
            "chat",
            "max_prompts",
            "max_prompt_tokens",
        ),
        *("max_new_tokens", "temperature", "device", "logit_chunk", "eval_every", "save_every"),
        "log_every",
    }
)
