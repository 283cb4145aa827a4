# SPDX-License-Identifier: Apache-2.0
"""The trained drafters of a method, and what their files say of themselves.

No vLLM: config.json and the figures of the training are read as they lie there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_spec_ext.bench.methods import CHECKPOINT_METHODS, Method
from vllm_spec_ext.errors import SpecExtError, shown
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers import registry

Kind = Literal["heads", "block", "eagle3", "draft_model", "other"]
"""Blockwise heads; a block drafter (``nar``, DFlash); an EAGLE-3 head; a model of its own; another
kind of vLLM's own methods."""

LEAST_KNOWN = 0.46
"""First draft tokens accepted of the weakest drafter that this package has figures of: its heads
for SmolLM2-135M-Instruct, on Spec-Bench, HumanEval and JFLEG. Larger heads, EAGLE-3
heads and draft models accept more."""

_CHAIN = 4  # draft tokens of a part, where the method drafts trees or more
_VLLM_KINDS: dict[str, Kind] = {"eagle3": "eagle3", "dflash": "block", "draft_model": "draft_model"}


@dataclass(frozen=True)
class Part:
    """One checkpoint of a method, drafting chains by itself."""

    kind: Kind
    model: str  # folder or Hub name
    method: Method  # that drafts with it in every step

    @property
    def folder(self) -> Path | None:
        """Where it lies; None = on the Hub."""
        folder = Path(self.model).expanduser()
        return folder if folder.is_dir() else None


@dataclass(frozen=True)
class Recorded:
    """What the files of a checkpoint say."""

    target: str | None = None  # name of the target that it was trained for
    finetuned: bool = False  # the target was trained along with it
    everywhere: float | None = None  # first draft tokens right, at all positions of held-out texts
    at_starts: float | None = None  # ... at the positions where a draft starts
    source: str = "nothing is recorded"
    per_token: tuple[float, ...] = ()  # `everywhere` of the first, second, ... draft token
    layers: tuple[int, ...] | None = None  # of the target, from 0, whose states it reads

    @property
    def expected(self) -> float:
        """First draft tokens accepted in drafting, to be expected."""
        return LEAST_KNOWN if self.at_starts is None else self.at_starts


def parts_of(method: Method) -> list[Part]:
    """The checkpoints of a method; none if it has no trained drafter.

    Raises:
        SpecExtError: Its options are wrong.
    """
    config = dict(method.config or {})
    name = str(config.get("method", ""))
    if name in CHECKPOINT_METHODS:
        return [Part(_VLLM_KINDS.get(name, "other"), str(config["model"]), method)]
    if not method.ours:
        return []
    schema = registry.info(name).options
    options: Any = parse_options(schema, {n: config[n] for n in config if n in _own(schema)}, name)
    if name == "auto":
        drafter = options.drafter
        if drafter is None:
            return []
        return parts_of(Method(drafter.method, {"method": drafter.method, **drafter.options}))
    if name == "blockwise":
        return [_heads(options.model, config)]
    if name == "nar":
        return [_part("block", "nar", options.model, _asked(config, options.tree, 8))]
    specs: list[Any] = {
        "small_model": lambda: [options],
        "token_tree": lambda: options.models,
        "cascade": lambda: [level for level in options.levels if hasattr(level, "model")],
    }.get(name, list)()
    inner = [level for level in getattr(options, "levels", ()) if hasattr(level, "method")]
    found = [
        part
        for level in inner
        if level.method in registry.names()
        for part in parts_of(Method(level.method, {"method": level.method, **level.options}))
    ]
    return found + [_model(spec) for spec in specs]


def _own(schema: type[Any]) -> set[str]:
    return set(schema.model_fields)


def _asked(config: Mapping[str, Any], tree: bool, default: int) -> int:
    """Draft tokens of a chain; a tree's number counts its nodes."""
    return default if tree else int(config.get("num_speculative_tokens") or default)


def _heads(model: str, config: Mapping[str, Any]) -> Part:
    asked = _asked(config, bool(config.get("tree")), _CHAIN)
    known = _json(Path(model).expanduser() / "config.json").get("num_heads")
    return _part("heads", "blockwise", model, min(asked, known) if isinstance(known, int) else 1)


def _model(spec: Any) -> Part:
    model, quantization = (spec, None) if isinstance(spec, str) else (spec.model, spec.quantization)
    kind: Kind = "eagle3" if _is_eagle3(model) else "draft_model"
    more = {} if quantization is None else {"quantization": quantization}
    return _part(kind, "small_model", model, _CHAIN, **more)


def _part(kind: Kind, method: str, model: str, num_tokens: int, **more: Any) -> Part:
    is_name = not model.startswith((".", "/", "~")) and (kind == "draft_model" or "/" in model)
    if not is_name and not Path(model).expanduser().is_dir():
        raise SpecExtError(
            f"no such folder: {shown(model)}; expected the folder of a checkpoint for {method}, or "
            "a name on the Hugging Face Hub like 'user/name'"
        )
    config = {"method": method, "model": model, "num_speculative_tokens": num_tokens, **more}
    return Part(kind, model, Method(method, {**config, "adaptive_length": False}))


def _is_eagle3(model: str) -> bool:
    from vllm_spec_ext.engine.models.eagle_checkpoint import is_eagle3, read_config

    try:
        return is_eagle3(read_config(model), model)
    except OSError:  # the engine says what is missing
        return False


def recorded(part: Part) -> Recorded:
    """What a checkpoint's files say; nothing of what is missing or damaged there."""
    folder = part.folder
    if folder is None:
        return Recorded(source="nothing is read of a checkpoint on the Hub")
    config = _json(folder / "config.json")
    if part.kind == "heads":
        return _of_heads(config)
    if part.kind == "block":
        return _of_block(config)
    facts = _json(folder / "training.json")
    return _of_draft(facts) if part.kind == "draft_model" else Recorded()


def _of_heads(config: Mapping[str, Any]) -> Recorded:
    told = _mapping(config, "training")
    rates = _top1(told)
    positions, steps = told.get("position_acceptance"), told.get("acceptance_length")
    harder = None if not positions or not steps else (steps - 1.0) / max(positions - 1.0, 1e-9)
    return _with_starts(
        Recorded(
            target=_text(config.get("target")),
            finetuned=bool(told.get("finetune")),
            everywhere=rates[0] if rates else None,
            per_token=rates,
        ),
        harder,
        "training.accuracy",
    )


def _of_block(config: Mapping[str, Any]) -> Recorded:
    told = _mapping(_mapping(config, "nar"), "training")
    rates = tuple(told.get("behind_right") or _top1(told))
    accepted, steps = told.get("accepted") or (), told.get("acceptance_length")
    harder = None if not accepted or not steps else (steps - 1.0) / max(sum(accepted), 1e-9)
    layers = _mapping(config, "dflash_config").get("target_layer_ids")
    return _with_starts(
        Recorded(
            target=_text(told.get("target")),
            everywhere=rates[0] if rates else None,
            per_token=rates,
            layers=tuple(layers) if isinstance(layers, list) else None,
        ),
        harder,
        "nar.training",
    )


def _of_draft(facts: Mapping[str, Any]) -> Recorded:
    figures = _mapping(facts, "figures")
    starts = figures.get("acceptance_per_position") or (None,)
    everywhere = _mapping(figures, "accuracy").get("top1")
    return Recorded(
        target=_text(facts.get("target")),
        everywhere=everywhere,
        at_starts=starts[0],
        source="training.json, figures" if starts[0] is not None else Recorded().source,
        per_token=() if everywhere is None else (everywhere,),
    )


def _with_starts(found: Recorded, harder: float | None, where: str) -> Recorded:
    """Also at the positions where drafts start: behind a wrong token, where text is hard.

    Args:
        found: With the figure at all positions.
        harder: Draft tokens accepted a step, over those accepted of a draft at any position.
        where: In config.json.
    """
    if found.everywhere is None:
        return found
    ratio = 1.0 if harder is None else min(1.0, harder)
    source = f"config.json, {where}: {found.everywhere:.2f} at all positions"
    fields = {**found.__dict__, "at_starts": found.everywhere * ratio, "source": source}
    return Recorded(**fields)


def notes(found: Recorded, target: str) -> list[str]:
    """What the files say that does not fit the given target, but need not be wrong."""
    said = []
    if found.target is not None and Path(found.target).name != Path(target).name:
        said.append(f"trained for {found.target}; the target is {target}")
    if found.finetuned:
        said.append(
            "the target was fine-tuned with these heads: serve the model that was saved with them"
        )
    return said


def _top1(told: Mapping[str, Any]) -> tuple[float, ...]:
    rows = told.get("accuracy") or ()
    return tuple(float(row["top1"]) for row in rows if isinstance(row, Mapping) and "top1" in row)


def _mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name)
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def nothing_to_check(method: Method) -> SpecExtError:
    """For a method without a trained drafter."""
    return SpecExtError(
        f"{method.name} drafts without a trained drafter, so there is nothing to check; "
        "`vllm-spec bench` measures what it gains"
    )
