# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a target's recorded answers a draft model guesses, by teacher forcing.

    python -m vllm_spec_ext.bench.draft_acceptance --draft FOLDER --answers answers.json --json out

The draft reads the answers with transformers, without an engine: a greedy chain is accepted up to
its first wrong token, and up to there it has read the answer itself. In the engine other kernels
may round differently. ``vllm-spec plan --drafts`` runs it, in a process of its own.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_spec_ext.errors import SpecExtError

_BATCH = 8
_LOGIT_CHUNK = 1024


def measure(draft: str, answers: Path, dtype: str) -> dict[str, Any]:
    """Facts of a draft, and for each answer the rank of each of its tokens among the guesses.

    Args:
        draft: Name or folder of the draft model.
        answers: JSON file with ``target`` (name or folder) and ``answers``, pairs of prompt and
            answer as token ids.
        dtype: As vLLM's option.

    Raises:
        SpecExtError: The draft cannot be loaded, or its token ids mean something else.
    """
    import numpy as np
    import torch

    from vllm_spec_ext.training.draft.evaluate import guess
    from vllm_spec_ext.training.shards import TokenData
    from vllm_spec_ext.training.target import load_target, load_tokenizer, pick_device

    recorded = json.loads(answers.read_text(encoding="utf-8"))
    check_ids(load_tokenizer(recorded["target"]), load_tokenizer(draft), draft)
    device = pick_device("auto")
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_target(draft, device, getattr(torch, dtype) if dtype != "auto" else auto)
    pairs = recorded["answers"]
    texts = [np.array([*prompt, *answer], np.int32) for prompt, answer in pairs]
    data = TokenData(
        answers,
        {},
        np.concatenate(texts),
        np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64),
        np.array([len(prompt) for prompt, _ in pairs], np.int32),
    )
    found, _, _ = guess(
        model,
        data,
        np.arange(len(texts)),
        max_length=max(map(len, texts)),
        batch_size=_BATCH,
        logit_chunk=_LOGIT_CHUNK,
    )
    ends = found.starts[1:-1].tolist()
    return {
        "num_layers": int(model.model.config.get_text_config().num_hidden_layers),
        "num_parameters": sum(p.numel() for p in model.model.parameters()),
        "ranks": [part.tolist() for part in np.split(found.ranks, ends)],
    }


def check_ids(target: Any, draft: Any, name: str) -> None:
    """Refuse a draft whose token ids mean something else than the target's.

    Raises:
        SpecExtError: With the number of ids that differ.
    """
    mine, theirs = draft.get_vocab(), target.get_vocab()
    differing = sum(theirs.get(token) != number for token, number in mine.items())
    if differing:
        raise SpecExtError(
            f"{name} is no draft for this target: {differing} of its {len(mine)} token ids mean "
            "something else there; expected a model with the target's tokenizer"
        )


def main() -> None:
    """Measure, and write what was measured; exit status 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft", required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, required=True, help="write the result here")
    given = vars(parser.parse_args())
    path: Path = given.pop("json")
    try:
        path.write_text(json.dumps(measure(**given)), encoding="utf-8")
    except SpecExtError as error:
        parser.exit(2, f"SpecExtError: {error}\n")


if __name__ == "__main__":
    main()
