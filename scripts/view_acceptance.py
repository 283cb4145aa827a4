# SPDX-License-Identifier: Apache-2.0
"""How often the target says over a part of its KV what it says over all of it.

    python scripts/view_acceptance.py MODEL --needles 12 --documents texts/ --count 12

In one engine, at every token of greedy answers to long prompts, each view is asked for the next
token, and nothing is drafted. So all views see the same texts, and what is printed is the
acceptance of a first draft token: of each view, by the length of the prompt, as the mean of the
texts with the lowest and the highest. Of needles it is the acceptance of answers that hold the
number, of their digits alone, and how many there are.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from vllm_spec_ext.bench.long_context import document_questions, holds, needle_questions
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    StepContext,
    ViewSpec,
    proposer,
)

METHOD = "ask_views"


class AskedOptions(MethodOptions):
    """What is asked."""

    budgets: list[int]
    """Tokens in sight of each view."""


@proposer(METHOD, summary="Asks views, drafts nothing.", options=AskedOptions)
class AskViews(BaseProposer):
    """Keeps what each view says next, and whether the target said so, too."""

    options: AskedOptions
    agreed: ClassVar[dict[str, list[dict[str, bool]]]] = defaultdict(list)
    """By request, token by token."""

    @classmethod
    def views(cls, options: MethodOptions) -> Sequence[ViewSpec]:
        """Both kinds in each size."""
        assert isinstance(options, AskedOptions)
        return [
            ViewSpec(f"{kind} {budget}", kind, budget, sink=32, recent=64)
            for kind in ("stream", "retrieval")
            for budget in options.budgets
        ]

    def start(self, engine: EngineHandle) -> None:
        """Take the views."""
        self._views = engine.views
        self._said: dict[str, dict[str, int]] = {}

    def propose(self, step: StepContext) -> list[Draft]:
        """Compare, and ask for the next token."""
        rows = []
        for row, request in enumerate(step.requests):
            said = self._said.pop(request.request_id, {})
            came = int(request.token_ids[-1])
            if said:
                AskViews.agreed[request.request_id].append(
                    {name: token == came for name, token in said.items()}
                )
            if request.room > 0:
                rows.append(row)
        for view in self._views:
            round_ = view.begin(step.requests, rows)
            roots = [[int(step.requests[row].token_ids[-1])] for row in round_.rows]
            best = round_.run(roots).argmax(-1).tolist() if roots else []
            for row, token in zip(round_.rows, best, strict=True):
                said = self._said.setdefault(step.requests[row].request_id, {})
                said[view.spec.name] = token
        return [EMPTY_DRAFT] * len(step.requests)


def spread(rates: Sequence[float]) -> str:
    """Mean of some texts, and the lowest and the highest."""
    return f"{mean(rates):.3f} [{min(rates):.2f}-{max(rates):.2f}]"


def rates_of(answer: Any, tokenizer: Any) -> dict[str, dict[str, float]]:
    """Agreement of each view in one answer: on all tokens, and on those with digits."""
    agreed = next(
        found
        for name, found in AskViews.agreed.items()
        if name == answer.request_id or name.startswith(f"{answer.request_id}-")
    )
    tokens = answer.outputs[0].token_ids[1:]  # nobody was asked for the first
    digits = ["".join(filter(str.isdigit, tokenizer.decode([token]))) for token in tokens]
    found: dict[str, dict[str, float]] = {}
    for name in agreed[0]:
        pairs = list(zip((one[name] for one in agreed), digits, strict=False))
        found[name] = {"all": mean(is_right for is_right, _ in pairs)}
        numbers = [is_right for is_right, digit in pairs if digit]
        if numbers:
            found[name]["digits"] = mean(numbers)
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--needles", type=int, default=0, metavar="N")
    parser.add_argument("--documents", metavar="PATH")
    parser.add_argument("--count", type=int, default=12, help="documents")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    questions = needle_questions(given.needles) if given.needles else []
    if given.documents:
        questions += document_questions(given.documents, given.count)
    if not questions:
        parser.error("nothing to ask: give --needles N or --documents PATH")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what is found lives in this process
    # The engine imports this file under its own name.
    sys.path.insert(0, str(Path(__file__).parent))
    registry.BUILTIN[METHOD] = "view_acceptance:AskViews"

    from vllm import LLM, SamplingParams

    engine = LLM(
        given.model,
        dtype="float32",
        max_num_seqs=1,
        block_size=given.block_size,
        enforce_eager=True,
        speculative_config={
            "method": METHOD,
            "num_speculative_tokens": 1,
            "budgets": given.budgets,
            "adaptive_length": False,
        },
    )
    answers = engine.chat(
        [list(question.opening) for question in questions],
        SamplingParams(temperature=0.0, max_tokens=given.max_tokens),
        use_tqdm=True,
    )
    AskViews.agreed = sys.modules["view_acceptance"].AskViews.agreed
    texts: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for question, answer in zip(questions, answers, strict=True):
        text = answer.outputs[0].text
        if question.expected is not None and not holds(text, question.expected):
            continue  # the target does not find it, either
        for name, parts in rates_of(answer, engine.get_tokenizer()).items():
            for part, rate in parts.items():
                if part == "all" or question.expected is not None:
                    texts[question.category, part, name].append(rate)
    for (category, part, name), rates in sorted(texts.items()):
        print(f"{category:24} {part:7} {name:15} {spread(rates)}  ({len(rates)} texts)")
    if given.out:
        rows = [[*key, rates] for key, rates in sorted(texts.items())]
        given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
