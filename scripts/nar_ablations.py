# SPDX-License-Identifier: Apache-2.0
"""What each part of a block drafter's training gains: a short training without each, same texts.

    python scripts/nar_ablations.py RUNS --model MODEL --data ANSWERS \
        --dataset spec_bench=question.jsonl:24 --dataset humaneval=HumanEval.jsonl.gz:24 \
        --only base,causal -- --max-steps 200 --batch-size 4 --warm-start --layers 1

ANSWERS is the data folder of a ``vllm-spec train nar``, whose flags stand behind ``--`` and are
shared by all variants. The target answers the prompts to measure on once, greedily, in vLLM. Each
variant is trained, measured on these answers by teacher forcing, and left in RUNS; what is there is
not done again. ``--measure NAME=FOLDER`` adds a drafter that was trained elsewhere.

Tables of all that are there, in Markdown, end the output. Standard errors: bootstrap over texts,
the same texts on both sides of a difference. They do not hold what another seed of the training
would change; for that there is the variant ``other_seed``.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BASE = "base"
# What a variant changes, as settings of `vllm-spec train nar`.
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    "other_seed": {"seed": 1},
    "no_glancing": {"glancing": 0.0},
    "no_prefix": {"visible_prefix": 0.0},
    "plain_blocks": {"glancing": 0.0, "visible_prefix": 0.0},
    "no_copies": {"copy_match": 0},
    "no_selector": {"selector_rank": 0},
    "causal": {"causal": True},
    "layers2": {"layers": 2},
    "slots4": {"slots": 4},
    "slots8": {"slots": 8},
}
TREES = (12, 32)
DRAWS = 2000  # of the bootstrap
Counts = dict[str, NDArray[np.int64]]  # figure -> [texts, 2], see NarFigures.by_text


def record_answers(
    model: str, datasets: Sequence[str], folder: Path, max_tokens: int, generator: str
) -> list[str]:
    """The target's greedy answers to the first turns of some datasets; each text's dataset."""
    from vllm_spec_ext.bench.datasets import load, parse
    from vllm_spec_ext.training.nar.schema import NarTraining
    from vllm_spec_ext.training.stages import prepare

    questions = load(parse(datasets))
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": question.opening[0]["content"]}) for question in questions]
    prompts.write_text("".join(line + "\n" for line in lines))
    config = NarTraining(
        model=model,
        out=folder / "none",
        data=folder / "data",
        stage="data",
        prompts=[prompts],
        max_prompt_tokens=1900,
        max_length=2048,
        max_new_tokens=max_tokens,
        generator=generator,
        dtype="bf16",
    )

    def no_task(*_: Any) -> Any:
        """Nothing is trained on these."""

    prepare(config, no_task, print)
    return [question.category.partition(" > ")[0] for question in questions]


class Measuring:
    """The target and its recorded answers, on which finished drafters are measured."""

    def __init__(self, model: str, folder: Path, read_layers: Sequence[int] | None) -> None:
        """Load the target; its states of the answers are kept on disk."""
        import torch

        from vllm_spec_ext.training.hidden import cached_states, write_cache
        from vllm_spec_ext.training.nar.schema import NarTraining
        from vllm_spec_ext.training.shards import read_data
        from vllm_spec_ext.training.target import load_target

        self.target = load_target(model, torch.device("cpu"), torch.bfloat16)
        self.data = read_data(folder / "data")
        self.config = NarTraining(
            model=model,
            out=folder / "none",
            data=folder / "data",
            max_length=2048,
            dtype="bf16",
            read_layers=None if read_layers is None else list(read_layers),
            sequences_per_pass=2,
        )
        layers = self.config.state_layers(self.target.num_layers)
        hidden, length = folder / "hidden", self.config.max_length
        write_cache(
            hidden,
            self.target,
            self.data,
            length,
            batch_size=4,
            layers=layers,
            dtype=torch.bfloat16,
        )
        self.states = cached_states(hidden, self.target, self.data, length, layers)

    def measure(self, drafter_folder: Path, *, switch_off: bool) -> dict[str, Counts]:
        """Counts by text of a finished drafter; also without its copies and its selector."""
        import torch

        from vllm_spec_ext.training.draft_vocab import DraftProjection
        from vllm_spec_ext.training.nar.evaluate import Drafting, measure_drafter
        from vllm_spec_ext.training.nar.model import NarDrafter
        from vllm_spec_ext.training.nar.nar_task import StateScales

        drafter = NarDrafter.load(drafter_folder)
        drafting = Drafting(
            drafter,
            StateScales(drafter.config.num_state_units),
            self.target,
            DraftProjection(self.target, drafter.extras.draft_vocab),
            self.data,
            self.states,
            self.config,
        )
        texts = np.arange(len(self.data))

        def counts(show_copies: bool) -> Counts:
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                return measure_drafter(drafting, texts, TREES, show_copies=show_copies).by_text

        found = {"as trained": counts(True)}
        if switch_off and drafter.config.nar.copy_match:
            found["copies switched off"] = counts(False)
        if switch_off and drafter.config.nar.selector_rank:
            plain = {
                name.removeprefix("plain_") if "tree" in name else name.replace("plain", "chain"): v
                for name, v in found["as trained"].items()
                if name.startswith(("plain", "slot"))
            }
            found["selector switched off"] = plain
        return found


def train_variant(
    changes: dict[str, Any], common: dict[str, Any], folder: Path, states: Path
) -> None:
    """Train one variant, on states that all variants share; it resumes where it was stopped."""
    from vllm_spec_ext.training.nar.schema import NarTraining
    from vllm_spec_ext.training.nar.trainer import train_nar

    config = NarTraining.model_validate({**common, **changes, "out": folder})
    config.run_folder.mkdir(parents=True, exist_ok=True)
    states.mkdir(exist_ok=True)
    link = config.run_folder / "hidden"
    if config.cache_hidden and not link.is_symlink():
        link.symlink_to(states.absolute())
    train_nar(config)


def ratio(counts: NDArray[np.int64]) -> float:
    """Of the sums of all texts."""
    above, below = counts.sum(0).tolist()
    return above / max(1, below)


def drawn(counts: NDArray[np.int64], texts: NDArray[np.int64]) -> NDArray[np.float64]:
    """[draws] that ratio of each draw of texts [draws, texts]."""
    sums = counts[texts].sum(1)
    return np.asarray(sums[:, 0] / np.maximum(1, sums[:, 1]), np.float64)


def cell(counts: Counts, base: Counts | None, name: str, unit: float = 1.0) -> str:
    """A figure and its standard error; behind it, its difference to the base's and that one's."""
    if name not in counts:
        return ""
    digits = 1 if unit > 1 else 2
    own = counts[name]
    texts = np.random.default_rng(0).integers(0, len(own), (DRAWS, len(own)))
    found = drawn(own, texts)
    text = f"{unit * ratio(own):.{digits}f}"
    if base is None or name not in base:
        return f"{text} ± {unit * found.std():.{digits}f}"
    gap = found - drawn(base[name], texts)
    change = unit * (ratio(own) - ratio(base[name]))
    return f"{text} ({change:+.{digits}f} ± {unit * gap.std():.{digits}f})"


def table(found: dict[str, Counts], pick: Callable[[Counts], Counts]) -> str:
    """Rows of variants; the first is the base of all differences."""
    base = pick(next(iter(found.values())))
    slots = max(
        int(name[5:]) for counts in found.values() for name in counts if name[:5] == "chain"
    )
    chains = [f"chain{k}" for k in (4, slots if slots < 6 else 6, 8) if k <= slots]
    columns = ["slot1", "slot2", "slot3", "slot4", *dict.fromkeys(chains)]
    columns += [f"tree{nodes}" for nodes in TREES]
    lines = ["| variant | " + " | ".join(columns) + " |", "|" + " --- |" * (len(columns) + 1)]
    for name, all_counts in found.items():
        counts = pick(all_counts)
        against = None if counts is base or name == next(iter(found)) else base
        cells = [cell(counts, against, c, 100.0 if c.startswith("slot") else 1.0) for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def print_tables(runs: Path, datasets: list[str]) -> None:
    """Of all variants that were measured."""
    found: dict[str, Counts] = {}
    others = sorted(f.stem for f in runs.glob("*.json") if f.stem not in VARIANTS)
    for file in [runs / f"{name}.json" for name in (*VARIANTS, *others)]:
        if file.is_file():
            for part, counts in json.loads(file.read_text()).items():
                label = file.stem if part == "as trained" else f"{file.stem}, {part}"
                found[label] = {key: np.array(value) for key, value in counts.items()}
    kinds = np.array(datasets)
    if not found:
        return
    for kind in ("all", *dict.fromkeys(datasets)):
        rows = np.ones(len(kinds), bool) if kind == "all" else kinds == kind
        positions = int(next(iter(found.values()))["slot1"][rows, 1].sum())
        print(f"\n{kind}: {int(rows.sum())} texts, {positions} positions\n")
        print(table(found, lambda counts, rows=rows: {k: v[rows] for k, v in counts.items()}))  # type: ignore[misc]


def parse_arguments() -> tuple[argparse.Namespace, dict[str, Any]]:
    """The script's own, and the settings that all variants share."""
    from vllm_spec_ext.training.flags import add_flags
    from vllm_spec_ext.training.nar.schema import NarTraining

    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dataset", action="append", required=True, metavar="NAME=FILE:COUNT")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer to measure on")
    parser.add_argument("--only", help=f"some of {','.join(VARIANTS)}; empty: none")
    parser.add_argument("--measure", action="append", default=[], metavar="NAME=FOLDER")
    given = parser.parse_args(words[:end])
    shared = argparse.ArgumentParser(prog="-- flags of vllm-spec train nar")
    add_flags(shared, NarTraining)
    settings = vars(shared.parse_args(words[end + 1 :]))
    settings.pop("config")
    return given, {**settings, "model": given.model, "data": given.data}


def main() -> None:
    """Record, train, measure, and print tables."""
    given, shared = parse_arguments()
    names = list(VARIANTS) if given.only is None else [n for n in given.only.split(",") if n]
    answers = given.runs / "measured"
    datasets = record_answers(
        given.model,
        given.dataset,
        answers,
        given.max_tokens,
        shared.get("generator", "vllm"),
    )
    measuring: Measuring | None = None
    todo = {name: given.runs / name for name in names}
    todo |= {name: Path(folder) for name, _, folder in (m.partition("=") for m in given.measure)}
    for name, folder in todo.items():
        file = given.runs / f"{name}.json"
        if file.is_file():
            continue
        if name in names:
            train_variant(VARIANTS[name], shared, folder, given.runs / "hidden")
        measuring = measuring or Measuring(given.model, answers, shared.get("read_layers"))
        found = measuring.measure(folder, switch_off=name == BASE or name not in names)
        listed = {
            part: {key: value.tolist() for key, value in counts.items()}
            for part, counts in found.items()
        }
        file.write_text(json.dumps(listed))
        print(f"measured {name}", flush=True)
    print_tables(given.runs, datasets)


if __name__ == "__main__":
    main()
