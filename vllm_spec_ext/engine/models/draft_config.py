# SPDX-License-Identifier: Apache-2.0
"""From a method's wish for a draft model to a configuration that was checked; in the front end."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_spec_ext.engine.models.dflash_checkpoint import (
    DFlashFacts,
    is_dflash,
    make_dflash,
    other_kind,
)
from vllm_spec_ext.engine.models.draft_checks import check_draft_model
from vllm_spec_ext.engine.models.eagle_checkpoint import (
    Eagle3Facts,
    is_eagle3,
    make_head,
    read_config,
)
from vllm_spec_ext.errors import SpecExtError, shown
from vllm_spec_ext.proposers.models import ModelSpec
from vllm_spec_ext.proposers.views import ViewSpec

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig

logger = logging.getLogger("vllm.spec_ext")


@dataclass(frozen=True)
class DraftConfig:
    """A draft model as the workers load it; travels by pickle."""

    name: str
    model_config: "ModelConfig"
    max_model_len: int  # most tokens it can read
    eagle3: Eagle3Facts | None = None  # None: no such head
    dflash: DFlashFacts | None = None  # None: no such drafter
    view: ViewSpec | None = None  # what it sees of its KV; None = all

    @property
    def reads(self) -> Eagle3Facts | DFlashFacts | None:
        """The target's states that it reads; None: a model of its own."""
        return self.eagle3 or self.dflash


def draft_configs(
    specs: Sequence[ModelSpec], target: "ModelConfig", parallel: "ParallelConfig"
) -> tuple[DraftConfig, ...]:
    """Read the configurations of draft models, and refuse those that cannot work.

    Args:
        specs: What the method wants.
        target: The target's ``ModelConfig``.
        parallel: The target's ``ParallelConfig``, which the drafts share.

    Raises:
        SpecExtError: With what was found, what was expected, and how to fix it.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise SpecExtError(f"draft models: found the names {names}, expected different ones")
    configs = []
    for spec in map(with_kind, specs):
        model_config = read_model_config(spec, target)
        check_draft_model(spec, model_config, target, parallel)
        if spec.view is not None and spec.kind != "causal_lm":
            raise SpecExtError(
                f"draft model {spec.name} ({shown(spec.model)}): found a drafter that reads the "
                f"target's hidden states, expected a model of its own for the view \""
                f'{spec.view.kind}"; leave "view" out, or say "view": "full"'
            )
        if spec.kind == "eagle3":
            facts = Eagle3Facts.of(model_config.hf_config)
            made = DraftConfig(spec.name, model_config, target.max_model_len, eagle3=facts)
        elif spec.kind == "dflash":
            block = DFlashFacts.of(model_config.hf_config, shown(spec.model))
            made = DraftConfig(spec.name, model_config, target.max_model_len, dflash=block)
        else:
            length = int(model_config.max_model_len)
            if length < target.max_model_len:
                logger.warning(
                    "vllm-spec-ext: draft model %s (%s) reads at most %d tokens, found "
                    "max_model_len %d: what is longer is not drafted for; use a draft model of a "
                    "longer context, or lower max_model_len",
                    spec.name,
                    shown(spec.model),
                    length,
                    target.max_model_len,
                )
            made = DraftConfig(spec.name, model_config, length, view=spec.view)
        configs.append(made)
    return tuple(configs)


def with_kind(spec: ModelSpec) -> ModelSpec:
    """The kind that the checkpoint says, where the method does not; block drafters are one.

    Raises:
        SpecExtError: There is no such model, or it drafts in a way that the method does not.
    """
    if spec.kind not in (None, "dflash"):
        return spec
    folder = _local(spec)
    try:
        found = read_config(spec.model if folder is None else folder)
    except OSError as error:
        raise _cannot_be_used(spec, error) from error
    other = other_kind(found)
    if other is not None:
        raise SpecExtError(
            f"draft model {spec.name} ({shown(spec.model)}): found {other}, a descendant of DFlash "
            "that drafts in a way of its own, expected DFlashDraftModel; use another checkpoint, "
            "or a method of vLLM's own for it"
        )
    if spec.kind == "dflash":
        if not is_dflash(found):
            names = ", ".join(found.get("architectures") or ()) or "none"
            raise SpecExtError(
                f"draft model {spec.name} ({shown(spec.model)}): found architecture {names}, "
                "expected a drafter of blocks (DFlashDraftModel) that was trained for this target"
            )
        return spec
    if is_dflash(found):
        raise SpecExtError(
            f"draft model {spec.name} ({shown(spec.model)}): found a DFlash drafter, which drafts "
            'a block at once, expected a model that drafts token by token; use the method "nar"'
        )
    return replace(spec, kind="eagle3" if is_eagle3(found, spec.model) else "causal_lm")


def _local(spec: ModelSpec) -> str | None:
    """The folder that is meant; None for a name on the Hub, or a relative folder.

    Raises:
        SpecExtError: There is no such folder, or no model in it.
    """
    if not spec.model.startswith(("/", "./", "../", "~")):
        return None
    folder = Path(spec.model).expanduser()
    if not folder.is_dir():
        raise SpecExtError(
            f"draft model {spec.name}: no such folder: {shown(spec.model)}; expected a folder in "
            "Hugging Face's layout (config.json, *.safetensors) or a name on its Hub"
        )
    if not (folder / "config.json").is_file():
        raise SpecExtError(
            f"draft model {spec.name}: no config.json in {shown(spec.model)}; expected a folder in "
            "Hugging Face's layout (config.json, *.safetensors)"
        )
    return str(folder)


def _cannot_be_used(spec: ModelSpec, error: Exception) -> SpecExtError:
    return SpecExtError(
        f"draft model {spec.name} ({shown(spec.model)}) cannot be used: {_reason(error)}; "
        "expected a model that vLLM can run by itself, or an EAGLE-3 head"
    )


def _reason(error: Exception) -> str:
    """The line that says what is wrong; pydantic puts others around it."""
    lines = [line.split(" [type=")[0].strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and "errors.pydantic.dev" not in line]
    return lines[-1].removeprefix("Value error, ") if lines else type(error).__name__


def read_model_config(spec: ModelSpec, target: "ModelConfig") -> "ModelConfig":
    """vLLM's configuration of a draft model, as vLLM makes it for its own (0.32
    ``SpeculativeConfig.__post_init__``).

    Raises:
        SpecExtError: There is no such model, or none that vLLM can run.
    """
    from vllm.config.model import ModelConfig

    folder = _local(spec)
    try:
        found = ModelConfig(
            model=spec.model if folder is None else folder,
            runner="draft",
            tokenizer=target.tokenizer,
            tokenizer_mode=target.tokenizer_mode,
            trust_remote_code=target.trust_remote_code,
            dtype=target.dtype,
            seed=target.seed,
            tokenizer_revision=target.tokenizer_revision,
            spec_target_max_model_len=target.max_model_len,
            disable_sliding_window=target.disable_sliding_window,
            quantization=spec.quantization,
            enforce_eager=target.enforce_eager,
            max_logprobs=target.max_logprobs,
            config_format=target.config_format,
        )
        if spec.kind == "eagle3":
            make_head(found, "eagle3", target.max_model_len)
        elif spec.kind == "dflash":
            make_dflash(found, target.max_model_len)
    except (ValueError, OSError) as error:
        raise _cannot_be_used(spec, error) from error
    return found
