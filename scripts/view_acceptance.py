# SPDX-License-Identifier: Apache-2.0
"""How often the target says over a part of its KV what it says over all of it.

    python scripts/view_acceptance.py MODEL --needles 12 --documents texts/ --count 12

In one engine, at every token of greedy answers to long prompts, each view is asked for the next
token, and nothing is drafted. So all views see the same texts, and what is printed is the
acceptance of a first draft token: of each view, by the length of the prompt, as the mean of the
texts with its 95 % interval, and the lowest and the highest; then what retrieval has more than
streaming of the same budget, text by text. Of needles it is the acceptance of answers that hold the
number, of their digits alone, and ``in sight``: in what share of the layers a view shows the pages
with the number while the answer gives its digits.

``--stale 1024 4 16`` asks two more retrieval views of 1,024 tokens, whose pages are chosen every
fourth and every sixteenth token.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.bench.long_context import (
    LENGTHS,
    document_questions,
    holds,
    needle_questions,
)
from vllm_spec_ext.bench.mean_of_texts import MeanOfTexts
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    RequestStep,
    StepContext,
    ViewSpec,
    proposer,
)
from vllm_spec_ext.proposers.views import ViewKind

if TYPE_CHECKING:
    from vllm_spec_ext.engine.views.paged_target import PagedTarget
    from vllm_spec_ext.engine.views.target_view import HostedView

METHOD = "ask_views"
STREAM: Final[Literal["stream"]] = "stream"
RETRIEVAL: Final[Literal["retrieval"]] = "retrieval"


class AskedOptions(MethodOptions):
    """What is asked."""

    budgets: list[int]
    """Tokens in sight of each view."""

    kinds: list[str]
    """Of the views."""

    stale: list[int]
    """A budget, and tokens from one choice of pages to the next; empty for none."""


@proposer(METHOD, summary="Asks views, drafts nothing.", options=AskedOptions)
class AskViews(BaseProposer):
    """Keeps what each view says next, and whether the target said so, too."""

    options: AskedOptions
    agreed: ClassVar[dict[str, list[dict[str, bool]]]] = defaultdict(list)
    """By request, token by token."""
    in_sight: ClassVar[dict[str, list[dict[str, float]]]] = defaultdict(list)
    """As ``agreed``: the share of layers that saw the pages of the prompt's digits."""
    digits: ClassVar[NDArray[np.int64]] = np.empty(0, np.int64)
    """Token ids; the made-up texts of needles hold no other digits."""

    @classmethod
    def views(cls, options: MethodOptions) -> Sequence[ViewSpec]:
        """Each kind in each size, and those whose pages are chosen seldom."""
        assert isinstance(options, AskedOptions)
        specs = [
            ViewSpec(f"{kind} {budget}", cast(ViewKind, kind), budget, sink=32, recent=64)
            for kind in options.kinds
            for budget in options.budgets
        ]
        budget, *ages = options.stale or [0]
        return specs + [
            ViewSpec(
                f"{RETRIEVAL} {budget} every {age}",
                RETRIEVAL,
                budget,
                sink=32,
                recent=64,
                refresh=age,
            )
            for age in ages
        ]

    def start(self, engine: EngineHandle) -> None:
        """Take the views."""
        self._views = engine.views
        self._said: dict[str, dict[str, int]] = {}
        self._showed: dict[str, dict[str, float]] = {}

    def propose(self, step: StepContext) -> list[Draft]:
        """Compare, and ask for the next token."""
        rows = []
        for row, request in enumerate(step.requests):
            said = self._said.pop(request.request_id, {})
            showed = self._showed.pop(request.request_id, {})
            came = int(request.token_ids[-1])
            if said:
                AskViews.in_sight[request.request_id].append(showed)
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
                request = step.requests[row]
                self._said.setdefault(request.request_id, {})[view.spec.name] = token
                showed = self._showed.setdefault(request.request_id, {})
                showed[view.spec.name] = share_in_sight(cast("HostedView", view), request)
        return [EMPTY_DRAFT] * len(step.requests)


def share_in_sight(view: "HostedView", request: RequestStep) -> float:
    """In what share of the layers a view shows all pages of the prompt's digits; 0 without any."""
    size = view._books.block_size
    prompt = request.token_ids[: request.num_prompt_tokens]
    pages = np.unique(np.flatnonzero(np.isin(prompt, AskViews.digits)) // size)
    sight = view.budget.sight((len(request.token_ids) - 1) // size)
    if not len(pages) or sight is None:
        return float(len(pages) > 0)
    choice = view._choices.get(request.request_id)
    start = sight.recent_start if choice is None else choice.recent_start
    hidden = pages[(pages >= sight.num_sink) & (pages < start)]
    if choice is None:
        return float(not len(hidden))
    chosen = cast("PagedTarget", view._runner).choices[view._index][:, choice.place].numpy()
    return float(np.mean([np.isin(hidden, layer).all() for layer in chosen]))


def spread(rates: Sequence[float]) -> str:
    """Mean of some texts with its interval, and the lowest and the highest."""
    found = MeanOfTexts.of(rates)
    return f"{found} [{min(rates):.2f}-{max(rates):.2f}]"


def rates_of(asked: type[AskViews], answer: Any, tokenizer: Any) -> dict[str, dict[str, float]]:
    """Of each view in one answer: agreement on all tokens, on those with digits, what it showed."""
    name = next(
        name
        for name in asked.agreed
        if name == answer.request_id or name.startswith(f"{answer.request_id}-")
    )
    agreed, in_sight = asked.agreed[name], asked.in_sight[name]
    tokens = answer.outputs[0].token_ids[1:]  # nobody was asked for the first
    digits = ["".join(filter(str.isdigit, tokenizer.decode([token]))) for token in tokens]
    found: dict[str, dict[str, float]] = {}
    for name in agreed[0]:
        pairs = list(zip((one[name] for one in agreed), digits, strict=False))
        found[name] = {"all": mean(is_right for is_right, _ in pairs)}
        numbers = [is_right for is_right, digit in pairs if digit]
        if numbers:
            showed = zip((one[name] for one in in_sight), digits, strict=False)
            found[name]["digits"] = mean(numbers)
            found[name]["in sight"] = mean(share for share, digit in showed if digit)
    return found


def parse() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--needles", type=int, default=0, metavar="N")
    parser.add_argument("--documents", metavar="PATH")
    parser.add_argument("--count", type=int, default=12, help="documents")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--kinds", nargs="+", choices=(STREAM, RETRIEVAL))
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument(
        "--stale", type=int, nargs="+", default=[], metavar=("BUDGET", "TOKENS"), help="see above"
    )
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.kinds = given.kinds or [STREAM, RETRIEVAL]
    if not given.needles and not given.documents:
        parser.error("nothing to ask: give --needles N or --documents PATH")
    return given


def differences(
    texts: dict[tuple[str, str, str], list[float]],
) -> dict[tuple[str, str, str], list[float]]:
    """What retrieval has more than streaming of the same budget, text by text."""
    found = {}
    for (category, part, name), rates in texts.items():
        kind, _, budget = name.partition(" ")
        other = (category, part, f"{STREAM} {budget}")
        if kind == RETRIEVAL and other in texts:
            pairs = zip(rates, texts[other], strict=True)
            found[category, part, f"more at {budget}"] = [own - rest for own, rest in pairs]
    return found


def main() -> None:
    """See the module's docstring."""
    given = parse()
    lengths = {name: LENGTHS[name] for name in given.lengths}
    questions = needle_questions(given.needles, lengths=lengths) if given.needles else []
    if given.documents:
        questions += document_questions(given.documents, given.count, lengths=lengths)
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
        kv_cache_memory_bytes=1 << 30,
        speculative_config={
            "method": METHOD,
            "num_speculative_tokens": 1,
            "kinds": given.kinds,
            "budgets": given.budgets,
            "stale": given.stale,
            "adaptive_length": False,
        },
    )
    asked, tokenizer = sys.modules["view_acceptance"].AskViews, engine.get_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)]
    asked.digits = np.array(ids, np.int64)
    params = SamplingParams(temperature=0.0, max_tokens=given.max_tokens)
    texts: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for number, question in enumerate(questions, 1):
        (answer,) = engine.chat([list(question.opening)], params, use_tqdm=False)
        print(f"{number} of {len(questions)}: {question.category}", file=sys.stderr)
        if question.expected is not None and not holds(answer.outputs[0].text, question.expected):
            continue  # the target does not find it, either
        for name, parts in rates_of(asked, answer, tokenizer).items():
            for part, rate in parts.items():
                if part == "all" or question.expected is not None:
                    texts[question.category, part, name].append(rate)
        if given.out:  # after each, as all of them may take an hour
            rows = [[*key, rates] for key, rates in sorted(texts.items())]
            given.out.write_text(json.dumps(rows, indent=1))
    found = {**texts, **differences(texts)}
    for (category, part, name), rates in sorted(found.items()):
        print(f"{category:20} {part:8} {name:23} {spread(rates)}")


if __name__ == "__main__":
    main()
