# SPDX-License-Identifier: Apache-2.0
"""Input copy: the paper's rule with every extra switched off, then each extra on its own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.errors import RequestOptionError
from vllm_spec_ext.proposers.base import (
    UNSALTED,
    EngineHandle,
    RequestFacts,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.chat_markers import find_chat_markers
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions, InputCopyRequest
from vllm_spec_ext.replay import Recording, replay

PAPER: dict[str, Any] = {
    "match": "unique",
    "near": 0,
    "fold_case": False,
    "growth": 0,
    "realign": 0,
    "also_output": False,
    "earlier_answers": 0,
}


class WordTokenizer:
    """One token a word; ids in the order of first use. Chat turns are <u> .. <e> and <a> .. <e>."""

    chat_template = "yes"
    all_special_ids = (0, 1, 2)

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<u>": 0, "<a>": 1, "<e>": 2}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        words = list(self.ids)
        return " ".join(words[i] for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def get_added_vocab(self) -> dict[str, int]:
        return {"<u>": 0, "<a>": 1, "<e>": 2}

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        marks = {"user": "<u>", "assistant": "<a>"}
        return " ".join(f"{marks[t['role']]} {t['content']} <e>" for t in turns) + " <a>"


def facts(prompt: Sequence[int], tokenizer: Any = None, max_model_len: int = 1000) -> RequestFacts:
    return RequestFacts(
        prompt=np.array(prompt, np.int32),
        vocab_size=100,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
    )


def resolved_request(options: InputCopyRequest, here: RequestFacts) -> InputCopyRequest:
    """As the engine does: checked, and then resolved."""
    InputCopy.check_request(options, here)
    return InputCopy.resolve_request(options, here)


class Session:
    """One request, driven token by token as an engine would."""

    def __init__(
        self,
        prompt: Sequence[int],
        request: InputCopyRequest | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        self.proposer = InputCopy(InputCopyOptions(**{**PAPER, **options}))
        self.proposer.start(EngineHandle(1000, 4096, 8, 32, "none", lambda: tokenizer))
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.request = request or InputCopyRequest()
        self.share_group: str | None = UNSALTED

    def next_request(
        self,
        prompt: Sequence[int],
        request: InputCopyRequest | None = None,
        share_group: str | None = UNSALTED,
    ) -> None:
        """End the request and begin another."""
        self.proposer.finish(["r"])
        self.share_group = share_group
        self.tokens, self.num_prompt = list(prompt), len(prompt)
        self.request = request or InputCopyRequest()

    def say(self, *new: int, room: int = 32) -> list[int]:
        """Give the target's new tokens; returns the draft."""
        self.tokens += new
        ids = np.array(self.tokens, np.int32)
        group = self.share_group
        step = RequestStep("r", ids, self.num_prompt, new, room, self.request, share_group=group)
        (draft,) = self.proposer.propose(StepContext([step]))
        assert draft.parents is None
        return draft.tokens.tolist()


SOURCE = [10, 11, 12, 13, 14, 15, 16, 17]


def test_drafts_the_source_to_its_end_and_goes_on_after_full_acceptance() -> None:
    session = Session(SOURCE)
    assert session.say(10) == SOURCE[1:]
    assert session.say(11, 12, 13, room=2) == [14, 15]
    assert session.say(14, 15) == [16, 17]
    assert session.say(16, 17) == []


def test_drafts_are_cut_to_their_room() -> None:
    session = Session(SOURCE)
    assert session.say(10, room=0) == []
    assert session.say(11, room=3) == [12, 13, 14]


def test_ids_that_the_model_cannot_say_are_not_drafted() -> None:
    """vLLM takes prompts with ids up to the tokenizer's largest, which may be above the model's."""
    session = Session([10, 11, 1000, 1003, 12, 13])
    assert session.say(10) == [11]
    assert session.say(11, 12) == [13]


def test_after_a_divergence_waits_for_a_match() -> None:
    session = Session(SOURCE)
    session.say(10)
    assert session.say(11, 99) == []
    assert session.say(98) == []
    assert session.say(15) == [16, 17]


def test_first_token_that_is_not_the_sources_is_looked_up() -> None:
    assert Session(SOURCE).say(13) == [14, 15, 16, 17]
    assert Session(SOURCE).say(99) == []


def test_only_a_unique_match_counts_and_longer_suffixes_make_it_unique() -> None:
    source = [1, 5, 6, 2, 5, 7, 3, 5, 6, 8]
    session = Session(source)
    assert session.say(99, 5) == []  # three places
    assert session.say(6) == []  # "5 6": two places
    session = Session(source)
    assert session.say(99, 2) == [5, 7, 3, 5, 6, 8]
    session = Session(source)
    assert session.say(99, 3, 5) == [6, 8]  # "5" alone is ambiguous, "3 5" is not
    assert Session(source, max_ngram=1).say(99, 3, 5) == []


def test_shortest_match() -> None:
    session = Session(SOURCE, min_ngram=2)
    assert session.say(99, 13) == []
    assert session.say(14) == [15, 16, 17]


def test_a_match_at_the_end_of_the_source_has_nothing_to_draft() -> None:
    assert Session(SOURCE).say(99, 17) == []


def test_latest_and_best_occurrence() -> None:
    source = [1, 5, 6, 2, 5, 7, 3, 5, 8]
    assert Session(source, match="latest").say(99, 5) == [8]
    session = Session(source, match="best")
    assert session.say(1, 5, 6) == [2, 5, 7, 3, 5, 8]
    assert session.say(98) == []
    assert session.say(5) == [7, 3, 5, 8]  # the first one behind the place where copying stopped
    assert Session(source, match="best").say(99, 5) == [6, 2, 5, 7, 3, 5, 8]


def test_near_resolves_an_ambiguous_match() -> None:
    source = [1, 5, 6, 2, 5, 7, 3, 5, 8]
    for near, expected in ((0, []), (4, [7, 3, 5, 8])):
        session = Session(source, near=near)
        session.say(1, 5, 6)
        session.say(98)
        assert session.say(5) == expected


def test_realign_assumes_one_replaced_token() -> None:
    session = Session(SOURCE, realign=3)
    session.say(10)
    assert session.say(99) == [12, 13, 14]
    assert session.say(12) == [13, 14, 15, 16, 17]  # confirmed: no guess any more
    session = Session(SOURCE, realign=3)
    session.say(10)
    session.say(99)
    assert session.say(98) == []  # the guess was wrong


def test_growth_limits_weak_matches() -> None:
    source = list(range(100, 180))
    session = Session(source, growth=3, first_draft=2)
    assert len(session.say(100)) == 3
    assert len(session.say(101)) == 6
    assert len(session.say(102, 103)) == 12
    assert len(Session(source, growth=1, first_draft=5).say(100)) == 5


def test_fold_case_matches_words_in_any_case_but_drafts_the_sources_own() -> None:
    tokenizer = WordTokenizer()
    source = tokenizer.encode("The Cat sat on a Mat today")
    said = tokenizer.encode("today the cat")
    assert Session(source, tokenizer=tokenizer, fold_case=True).say(*said) == source[2:]
    assert Session(source, tokenizer=tokenizer).say(*said) == []


def test_also_output_continues_the_requests_own_words() -> None:
    session = Session([1, 2], also_output=True, output_min_ngram=2)
    assert session.say(50, 51, 52, 53, 60, 50) == []
    assert session.say(51, room=3) == [52, 53, 60]


def test_a_repetition_shorter_than_the_room_repeats_itself() -> None:
    session = Session([1, 2], also_output=True)
    assert session.say(50, 51, 52, 50, 51, 52, room=7) == [50, 51, 52, 50, 51, 52, 50]


def test_longer_match_wins_between_source_and_output() -> None:
    source = [30, 5, 31, 32]
    session = Session(source, also_output=True)
    session.say(60, 61, 5, 70, 71)
    assert session.say(61, 5, room=2) == [70, 71]
    session = Session(source, also_output=True)
    session.say(5, 70, 71)
    assert session.say(30, 5, room=2) == [31, 32]


def test_earlier_answers_lend_their_openings_and_endings() -> None:
    session = Session(SOURCE, earlier_answers=1000)
    session.say(50, 51, 52, 10, 11, 12, 60, 2)
    session.next_request([20, 21, 22, 23])
    assert session.say(50, room=2) == [51, 52]  # "begin, 50" agrees in two places
    assert session.say(51, 52, 20) == [21, 22, 23]  # the source goes on where it agrees
    assert session.say(21, 22, 23, 60) == [2]  # to the answer's end and not into the next
    session.next_request(SOURCE)
    assert session.say(10) == SOURCE[1:], "the source wins a tie"


def test_a_late_step_is_said_again_without_the_answers_that_came_meanwhile() -> None:
    session = Session([1], earlier_answers=1000)
    proposer = session.proposer
    proposer.late_drafter(EngineHandle(1000, 4096, 8, 32, "none", lambda: None))
    session.say(50, 51, 52)
    session.next_request([2])  # while a step is queued
    assert session.say(50) == [], "as the device drafted"
    proposer.keep_answers()  # as when it is asked next
    assert session.say(51) == [52]
    session.next_request([3])
    proposer.finish([])  # nothing is drafted for long: they do not pile up
    assert not proposer._finished
    assert session.say(50) == [51], "to the end of the latest answer"


def test_a_prompt_that_is_asked_again_is_answered_alike() -> None:
    session = Session([40, 41, 42], earlier_answers=1000)
    session.say(50, 51, 52)
    session.next_request([40, 41, 43])
    session.say(50, 61, 62)
    session.next_request([40, 41, 42])
    assert session.say(50) == [51, 52], "not as the latest one that began alike"
    session.next_request([50, 9, 8], share_group=UNSALTED)
    assert session.say(50) == [9, 8], "of another prompt, the source is the better guess"


def test_requests_may_keep_their_answer_to_themselves() -> None:
    session = Session([1], InputCopyRequest(remember=False), earlier_answers=1000)
    session.say(50, 51, 52)
    session.next_request([2])
    assert session.say(50) == []


def test_answers_are_lent_within_a_share_group_alone() -> None:
    session = Session([1], earlier_answers=1000)
    groups = ["a", "b", UNSALTED, None]
    for i, group in enumerate(groups):
        session.next_request([1], share_group=group)
        assert session.say(50) == [], "nobody before was of this group"
        session.say(60 + i)
    for i, group in enumerate(groups):
        session.next_request([1], share_group=group)
        assert session.say(50, room=1) == ([] if group is None else [60 + i])


def test_groups_of_earlier_answers_are_bounded() -> None:
    session = Session([1], earlier_answers=100, max_cache_salts=3)
    session.say(50, 40)
    for i in range(1000):
        session.next_request([1], share_group=f"salt {i}")
        session.say(50, 100 + i % 800)
        if i % 2:
            session.next_request([1], share_group="kept")
            session.say(50, 30)
        assert session.proposer._answers.num_groups <= 1 + 3
        assert len(session.proposer._answers) <= 4 * 101
    session.next_request([1], share_group="salt 500")
    assert session.say(50) == [], "unused for long, forgotten"
    for group, token in (("salt 999", 299), ("kept", 30), (UNSALTED, 40)):
        session.next_request([1], share_group=group)
        assert session.say(50, room=1) == [token], group


@pytest.mark.parametrize("limit", [1, 2, 7, 40])
def test_the_memory_of_earlier_answers_is_bounded(limit: int) -> None:
    session = Session([1], earlier_answers=limit)
    for i in range(100):
        session.say(200 + i, 300, 400 + i)
        session.next_request([1])
        assert len(session.proposer._answers) <= limit + 1
    if limit == 40:
        assert session.say(299) == [300, 499], "the newest are kept"
        session.next_request([1])
        assert session.say(200) == [], "the oldest are not"


def test_span_of_the_prompt() -> None:
    prompt = [1, 2, 3, *SOURCE, 4, 5]
    session = Session(prompt, InputCopyRequest(source_span=(3, 3 + len(SOURCE))))
    assert session.say(10) == SOURCE[1:]
    assert session.say(99, 4) == []  # behind the span


def test_text_that_is_not_in_the_prompt() -> None:
    session = Session([1, 2], InputCopyRequest(source_token_ids=SOURCE))
    assert session.say(10) == SOURCE[1:]
    tokenizer = WordTokenizer()
    asked = InputCopyRequest(source_text="a b c")
    resolved = resolved_request(asked, facts([1], tokenizer))
    assert resolved.source_text is None
    assert resolved.source_token_ids == tokenizer.encode("a b c")


def test_last_user_message_of_a_chat() -> None:
    tokenizer = WordTokenizer()
    first = tokenizer.encode("<u> one two <e> <a> three <e> <u>")
    message = tokenizer.encode("four five six seven")
    prompt = [*first, *message, *tokenizer.encode("<e> <a>")]
    for source, behind in (("auto", prompt), ("last_user", message)):
        begun = Session(prompt, tokenizer=tokenizer, source=source)
        assert begun.say(message[0]) == behind[behind.index(message[0]) + 1 :]
    one, six = tokenizer.encode("one six")
    for source in ("auto", "prompt"):
        assert Session(prompt, tokenizer=tokenizer, source=source).say(one) == prompt[2:]
    assert Session(prompt, tokenizer=tokenizer, source="last_user").say(one) == []
    # What stands twice is looked for in the message first, and the end of it in all of the prompt.
    twice = [*tokenizer.encode("<u> six two <e> <a> six three <e> <u>"), *message]
    asked = Session(twice, tokenizer=tokenizer, match="best")
    assert asked.say(message[0]) == message[1:]
    assert asked.say(tokenizer.encode("two")[0])[:1] == tokenizer.encode("<e>")
    assert Session(twice, tokenizer=tokenizer, match="best").say(six) == message[3:]
    # A prompt without chat markers is a source as a whole.
    assert Session(message, tokenizer=tokenizer).say(message[0]) == message[1:]


def test_markers_of_a_real_template() -> None:
    """A byte-level BPE tokenizer, a ChatML-like template, white space next to the message."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )
    markers = find_chat_markers(tokenizer)
    assert markers is not None
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "Copy <this>, please.\nAll of it."},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    prompt = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    span = markers.last_user_span(prompt)
    assert span is not None
    start, end = span
    found = tokenizer.decode(prompt[start:end].tolist())
    assert found == turns[-1]["content"]
    assert markers.last_user_span(np.array([1, 2, 3], np.int32)) is None


@pytest.mark.parametrize("template", [None, "{{ 1/0 }}", "{% for m in messages %}same{% endfor %}"])
def test_templates_without_markers(template: str | None) -> None:
    class Odd(WordTokenizer):
        chat_template = template  # type: ignore[assignment]

        def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
            if "1/0" in (template or ""):
                raise ZeroDivisionError
            return "same"

    assert find_chat_markers(Odd()) is None
    assert find_chat_markers(None) is None


def test_text_between_markers() -> None:
    tokenizer = WordTokenizer()
    prompt = tokenizer.encode("fix BEGIN wrong END no BEGIN he go home END now")
    asked = InputCopyRequest(source_markers=("BEGIN", "END"))
    resolved = resolved_request(asked, facts(prompt, tokenizer))
    assert resolved.source_span is not None
    start, end = resolved.source_span
    assert tokenizer.decode(prompt[start:end]).strip() == "he go home"
    assert resolved.source_markers is None


@pytest.mark.parametrize(
    ("request_options", "words"),
    [
        ({"source_span": (0, 9)}, "source_span: ends at token 9, but the prompt has 3"),
        ({"source_markers": ("NONE", "c")}, "does not occur"),
        ({"source_markers": ("a", "NONE")}, "does not occur"),
        ({"source_markers": ("a ", "b")}, "no whole token"),
    ],
)
def test_sources_outside_the_prompt(request_options: dict[str, Any], words: str) -> None:
    tokenizer = WordTokenizer()
    prompt = tokenizer.encode("a b c")
    with pytest.raises(RequestOptionError, match=words) as error:
        resolved_request(InputCopyRequest(**request_options), facts(prompt, tokenizer))
    assert error.value.parameter == next(iter(request_options))


@pytest.mark.parametrize("given", [{"source_text": "a"}, {"source_markers": ("a", "b")}])
def test_text_without_a_tokenizer(given: dict[str, Any]) -> None:
    with pytest.raises(RequestOptionError, match="without a tokenizer"):
        resolved_request(InputCopyRequest(**given), facts([1]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"source_token_ids": [0, 99, 100]}, "found token id 100, but the model has 100 tokens"),
        ({"source_token_ids": [2**40]}, "found token id 1099511627776"),
        ({"source_token_ids": [1] * 33}, "found 33 tokens, expected at most 32"),
        ({"source_text": "a " * 17}, None),
        ({"source_text": "a " * 40}, "found 40 tokens, expected at most 32"),
        ({"source_text": "a" * 257}, "found 257 characters, expected at most 256"),
        ({"source_token_ids": [0, 99] * 16}, None),
        ({"source_token_ids": []}, None),
    ],
)
def test_bounds_of_a_source(given: dict[str, Any], words: str | None) -> None:
    here = facts([1], WordTokenizer(), max_model_len=8)
    if words is None:
        assert resolved_request(InputCopyRequest(**given), here).source_token_ids is not None
        return
    with pytest.raises(RequestOptionError, match=words) as error:
        resolved_request(InputCopyRequest(**given), here)
    assert error.value.parameter == next(iter(given))


def test_what_was_resolved_can_be_resolved_again_without_a_tokenizer() -> None:
    """As the engine does with what came from the front end."""
    tokenizer = WordTokenizer()
    prompt = tokenizer.encode("BEGIN he go home END")
    for given in ({"source_text": "he go"}, {"source_markers": ("BEGIN", "END")}, {}):
        asked = InputCopyRequest.model_validate(given)
        resolved = resolved_request(asked, facts(prompt, tokenizer))
        assert resolved_request(resolved, facts(prompt)) == resolved


def test_disabled_requests_draft_nothing() -> None:
    assert Session(SOURCE, InputCopyRequest(enabled=False)).say(10) == []


def test_state_is_freed_and_a_resumed_request_starts_over() -> None:
    session = Session(SOURCE)
    session.say(10)
    session.proposer.finish(["r", "never seen"])
    assert session.proposer._copies == {}
    # After a preemption the whole output comes as old tokens; the cursor is found again.
    assert session.say(11, 12) == SOURCE[3:]


def test_an_answer_is_remembered_as_a_whole_after_a_preemption() -> None:
    session = Session(SOURCE, earlier_answers=1000)
    session.say(40, 41, 42)
    session.proposer.finish(["r"])
    session.say(43)
    session.say(44, 45)
    session.proposer.finish(["r"])
    memory = session.proposer.earlier_answers(UNSALTED)
    assert memory is not None
    said = [token for token in memory.tokens.tolist() if token < 1000]
    assert said == [40, 41, 42, 40, 41, 42, 43, 44, 45]


def test_what_the_output_ends_with_is_looked_for_in_the_source_too() -> None:
    session = Session([60, 30, 77, 78], also_output=True)
    session.say(60, 30, 60, 30)
    # Twice the same is the end of the output, with nothing behind it.
    assert session.proposer.continue_from("r", [60, 30], 2).tolist() == [77, 78]


def test_replay_shows_what_sharing_gains() -> None:
    recording = Recording([1, 2], [50, 51, 52, 53, 54, 55, 56, 57])
    steps = []
    for earlier_answers in (1000, 0):
        proposer = InputCopy(InputCopyOptions(earlier_answers=earlier_answers))
        engine = EngineHandle(1000, 4096, 1, 32, "none", lambda: None)
        proposer.start(engine)
        steps.append(replay(proposer, [recording] * 3, engine).num_steps)
    # The second request ends in its first step, whose tokens are read all the same: the third one
    # finds them in the latest answer that opened alike.
    assert steps == [7 + 1 + 1, 7 * 3]


def test_the_outcome_of_an_earlier_draft_is_not_told_of_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft that is not verified is followed for a few steps, in which others may be empty."""
    session = Session(SOURCE)
    assert session.say(10) == SOURCE[1:]
    told: list[int] = []
    monkeypatch.setattr(session.proposer._rates, "observe", lambda kind, *_: told.append(kind))
    outcome = StepOutcome("r", 7, 7, tuple(range(7)))
    session.proposer.observe([outcome])
    assert session.say(*SOURCE[1:]) == []  # many tokens agree now: a draft of another kind
    session.proposer.observe([outcome])
    assert told[0] == told[1]
