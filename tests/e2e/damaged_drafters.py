# SPDX-License-Identifier: Apache-2.0
"""Copies of the packaged drafters with one fault each, and heads trained on the wrong states."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from vllm_spec_ext.bench import prompts
from vllm_spec_ext.cli.demo_drafters import demo_heads
from vllm_spec_ext.proposers.blockwise.heads import BlockwiseHeads, HeadsConfig
from vllm_spec_ext.training.batches import make_batch
from vllm_spec_ext.training.blockwise.tokens_seen import tokens_seen
from vllm_spec_ext.training.draft_vocab import DraftProjection
from vllm_spec_ext.training.hidden import live_states
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import load_target, load_tokenizer

_WEIGHTS = "model.safetensors"
_STEPS = 150


def shuffled_head(folder: Path) -> Path:
    """The packaged heads, with the first one's output matrix in another order."""
    weights = _copy(demo_heads(), folder)
    rows, width = weights["w_out"].shape
    first = slice(0, width // 4)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    weights["w_out"][:, first] = weights["w_out"][order][:, first]
    save_file(weights, folder / _WEIGHTS, {"format": "pt"})
    return folder


def random_heads(folder: Path) -> Path:
    """Heads of the packaged ones' shapes, with random weights."""
    weights = _copy(demo_heads(), folder)
    chance = torch.Generator().manual_seed(1)
    for name, value in weights.items():
        if value.is_floating_point():
            spread = value.float().std()
            weights[name] = (torch.randn(value.shape, generator=chance) * spread).to(value.dtype)
    save_file(weights, folder / _WEIGHTS, {"format": "pt"})
    return folder


def heads_before_norm(folder: Path, model: str, prompt_file: Path, max_tokens: int) -> Path:
    """One head that knows the answers to these prompts by heart, over states without the norm."""
    target = load_target(model, torch.device("cpu"), torch.float32)
    data = _answers(target.model, model, prompt_file, max_tokens)
    listed = np.unique(data.token_ids)
    config = HeadsConfig(
        target=model,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=1,
        head_width=256,
        condition_on_next=True,
        draft_vocab_size=len(listed),
        training={"accuracy": [{"top1": 0.9}]},
    )
    torch.manual_seed(0)
    heads = BlockwiseHeads(config)
    heads.draft_vocab = torch.from_numpy(listed.astype(np.int32))
    batch = make_batch(data, np.arange(len(data)), 1, 4096)
    with torch.no_grad():
        states = live_states(target, (target.num_layers,))(batch)
    seen = tokens_seen(batch, slice(None), states.device)
    projection = DraftProjection(target, heads.draft_vocab)
    wanted = projection.places(batch.targets[:, 0])
    optimizer = torch.optim.Adam(heads.parameters(), lr=1e-3)
    for _ in range(_STEPS):
        logits = projection(heads(states, seen, target.embed)[:, 0])
        loss = functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = (projection(heads(states, seen, target.embed)[:, 0]).argmax(-1) == wanted).float()
    assert right.mean() > 0.9, "the head did not learn"
    folder.mkdir()
    save_file(dict(heads.state_dict()), folder / _WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(config.model_dump_json())
    return folder


def _copy(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    shutil.copytree(source, folder)
    weights: dict[str, torch.Tensor] = load_file(folder / _WEIGHTS)
    return weights


def _answers(model: Any, name: str, prompt_file: Path, max_tokens: int) -> TokenData:
    """The target's greedy answers, by transformers."""
    tokenizer = load_tokenizer(name)
    texts, lengths = [], []
    for question in prompts.load(str(prompt_file), field="prompt", template=None, limit=None):
        ids = tokenizer.apply_chat_template(
            list(question.opening), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        with torch.no_grad():
            whole = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)
        texts.append(whole[0].numpy().astype(np.int32))
        lengths.append(len(ids))
    return TokenData(
        prompt_file,
        {},
        np.concatenate(texts),
        np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64),
        np.array(lengths, np.int32),
    )
