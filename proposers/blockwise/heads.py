# SPDX-License-Identifier: Apache-2.0
"""The prediction heads of blockwise parallel decoding, and their checkpoint folder.

Stern et al. 2018, sec. 4: one feed-forward layer between the decoder's output and the vocabulary
projection, with a hidden layer of width ``k * d_h``, an output of ``k * d_model``, a residual from
its input to each of the k outputs, and the model's *own* projection for all of them.

Three deviations, on purpose. The paper's first head p_1 is the model itself here, so the target is
untouched and only the other ``num_heads = k - 1`` heads have weights. A head may also see the
embedding of the next token (``condition_on_next``), and what followed when the end of the text
occurred before (``copy_match``).

Torch only: neither vLLM nor the trainer is imported.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.draft_columns import ids_problem, shapes_and_ids
from vllm_spec_ext.tensor_files import check_readable, reading

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
_AGAIN = "copy or train the heads again"
MOST_UNITS = 1 << 20  # far above any model; below it, no product of sizes overflows


class HeadsConfig(BaseModel):
    """``config.json`` of a heads folder: their shape, and the target that they belong to."""

    # extra="ignore": a newer writer may add facts that an older reader does not need.
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    model_type: Literal["vllm_spec_ext_blockwise"] = "vllm_spec_ext_blockwise"
    format_version: Literal[1] = 1
    target: str
    """Name or folder of the target when the heads were trained; for people, never compared."""
    hidden_size: int = Field(ge=1, le=MOST_UNITS)
    vocab_size: int = Field(ge=1)
    tokenizer_fingerprint: str | None = None
    """See :func:`vllm_spec_ext.fingerprint.tokenizer_fingerprint`; None = not known."""
    num_heads: int = Field(ge=1, le=32)
    """Heads with weights = most draft tokens in a row. The paper's k counts the target itself as
    its first head: ``k = num_heads + 1``."""
    head_width: int = Field(ge=1, le=MOST_UNITS)
    """Hidden units of each head (d_h)."""
    block_diagonal: bool = False
    """Each head has a private hidden layer, not all one of num_heads * head_width."""
    condition_on_next: bool = False
    """Heads see the embedding of the token right after the hidden state's position."""
    copy_match: int = Field(default=0, ge=0, le=64)
    """Heads see the tokens that followed the latest place where the end of the text occurred
    before, compared over up to this many tokens; 0 = they do not."""
    copy_map: bool = False
    """Embeddings of copied tokens pass a matrix on their way to the output, because the target's
    vocabulary projection is not its embedding (untied)."""
    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Tokens that the heads can draft, listed in the weights as ``draft_vocab``; None = all."""
    training: dict[str, Any] = Field(default_factory=dict)
    """What the heads were trained on and what they reached; for people."""

    @property
    def block_size(self) -> int:
        """The paper's k."""
        return self.num_heads + 1

    @property
    def num_parameters(self) -> int:
        """Weights and biases of all heads."""
        inner = self.num_heads * self.head_width
        fan_out = self.hidden_size * (1 if self.block_diagonal else self.num_heads)
        total = inner * (self.fan_in + 1 + fan_out) + self.num_heads * self.hidden_size
        if self.copy_match:
            per_length = (self.copy_match + 1) * (inner + self.num_heads)
            total += per_length + inner + self.num_heads * self.hidden_size
            total += self.hidden_size**2 * self.copy_map
        return total

    @property
    def fan_in(self) -> int:
        """Numbers that the hidden layer sees."""
        return self.hidden_size * (1 + self.condition_on_next + bool(self.copy_match))


class TokensSeen(NamedTuple):
    """Token ids that heads see beside the hidden state, int64."""

    following: Tensor  # [n] the target's own next token
    copied: Tensor | None = None  # [n, num_heads] what followed at an earlier place, if copy_match
    copied_length: Tensor | None = None  # [n] tokens that agree with that place; 0 = none found

    @classmethod
    def of_rows(cls, rows: Tensor) -> "TokensSeen":
        """Of [n, 2 + num_heads] int64: next token, tokens that agree, and the copied ones."""
        return cls(rows[:, 0], rows[:, 2:], rows[:, 1])

    @property
    def shown(self) -> Tensor | None:
        """[n, num_heads] the copied tokens, -1 where none were found; None without `copy_match`."""
        if self.copied is None or self.copied_length is None:
            return None
        return self.copied.masked_fill((self.copied_length == 0)[:, None], -1)


class BlockwiseHeads(nn.Module):
    """All heads at once: two matrix products, no matter how many heads there are.

    The output layer starts at zero, so that untrained heads predict exactly what the target's
    own head predicts.
    """

    def __init__(self, config: HeadsConfig) -> None:
        """Build the layers in float32; ``to(dtype, device)`` as for any module."""
        super().__init__()
        self.config = config
        self.dropout = 0.0  # of hidden units, in training only
        heads, width, size = config.num_heads, config.head_width, config.hidden_size
        self.w_in = nn.Linear(config.fan_in, heads * width)
        nn.init.kaiming_uniform_(self.w_in.weight, nonlinearity="relu")
        nn.init.zeros_(self.w_in.bias)
        if config.block_diagonal:
            self.w_out = nn.Parameter(torch.zeros(heads, width, size))
        else:
            self.w_out = nn.Parameter(torch.zeros(heads * width, heads * size))
        self.b_out = nn.Parameter(torch.zeros(heads * size))
        if config.copy_match:
            lengths = config.copy_match + 1
            self.copy_bias = nn.Parameter(torch.zeros(lengths, heads * width))
            # How strongly each head's copied token is added: by match length, and by hidden units.
            self.copy_trust = nn.Parameter(torch.zeros(lengths, heads))
            self.copy_weight = nn.Parameter(torch.zeros(heads, width))
            self.copy_scale = nn.Parameter(torch.ones(heads, size))
            if config.copy_map:
                self.copy_map = nn.Parameter(torch.eye(size))
        self.draft_vocab: Tensor | None
        listed = config.draft_vocab_size
        # [draft_vocab_size] int32 token ids, ascending
        self.register_buffer(
            "draft_vocab", None if listed is None else torch.arange(listed, dtype=torch.int32)
        )

    def forward(
        self,
        hidden: Tensor,  # [n, hidden_size] the target's final hidden states, after the last norm
        seen: TokensSeen | None = None,  # needed with condition_on_next or copy_match
        embed: Callable[[Tensor], Tensor] | None = None,  # the target's, ids [m] -> [m, size]
    ) -> Tensor:
        """States for the target's own vocabulary projection.

        Returns:
            [n, num_heads, hidden_size]: projecting row ``[:, i]`` gives the logits of the token
            ``i + 2`` positions after the hidden state's.

        Raises:
            ValueError: Tokens that these heads must see are missing.
        """
        config = self.config
        heads, size = config.num_heads, config.hidden_size
        inputs, copied, lengths = [hidden], None, None
        if config.condition_on_next or config.copy_match:
            following, copied, lengths = self._embed(seen, embed, hidden.dtype)
            if config.condition_on_next:
                inputs.append(following)
            if copied is not None:
                inputs.append(copied[:, 0])
        before = self.w_in(torch.cat(inputs, dim=-1))
        if lengths is not None:
            before = before + self.copy_bias[lengths].to(before.dtype)
        inner = torch.relu(before)
        if self.training and self.dropout > 0.0:
            inner = nn.functional.dropout(inner, self.dropout)
        if config.block_diagonal:
            per_head = inner.view(-1, heads, config.head_width).transpose(0, 1)
            delta = torch.bmm(per_head, self.w_out.to(inner.dtype)).transpose(0, 1)
        else:
            delta = (inner @ self.w_out.to(inner.dtype)).view(-1, heads, size)
        delta = delta + self.b_out.to(inner.dtype).view(heads, size)
        if copied is not None and lengths is not None:
            units = inner.view(-1, heads, config.head_width)
            trust = (units * self.copy_weight.to(inner.dtype)).sum(-1)
            trust = trust + self.copy_trust[lengths].to(inner.dtype)
            if config.copy_map:
                copied = copied @ self.copy_map.to(inner.dtype)
            delta = delta + trust.unsqueeze(-1) * self.copy_scale.to(inner.dtype) * copied
        return hidden.unsqueeze(1) + delta

    def _embed(
        self,
        seen: TokensSeen | None,
        embed: Callable[[Tensor], Tensor] | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Embeddings of the next token and of the copied ones, zero where there is no copy."""
        if seen is None or embed is None:
            raise ValueError("the tokens that these heads are shown are missing")
        if not self.config.copy_match:
            return unit_rms(embed(seen.following)).to(dtype), None, None
        if seen.copied is None or seen.copied_length is None:
            raise ValueError("the copied tokens that these heads are shown are missing")
        # One look-up: with tensor parallelism each is an exchange between the GPUs.
        token_ids = torch.cat([seen.following.unsqueeze(1), seen.copied], dim=1)
        shown = unit_rms(embed(token_ids.flatten())).view(*token_ids.shape, -1)
        copied = shown[:, 1:] * (seen.copied_length > 0)[:, None, None]
        return shown[:, 0].to(dtype), copied.to(dtype), seen.copied_length


def unit_rms(x: Tensor) -> Tensor:
    """Float32 with a mean square of 1; engines disagree on scaled embeddings (Gemma)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-12)


def load_heads(
    path: str | Path,
    *,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    fingerprint: str | None = None,
    num_draft_tokens: int | None = None,
) -> tuple[HeadsConfig, BlockwiseHeads]:
    """Read a heads folder and refuse one that belongs to another target.

    Args:
        path: Folder with ``config.json`` and ``model.safetensors``, or a Hugging Face Hub name.
        hidden_size: The target's, if known.
        vocab_size: The target's, if known.
        fingerprint: Of the target's tokenizer, if known.
        num_draft_tokens: Heads that the caller is going to use.

    Raises:
        SpecExtError: No such folder, a damaged file, a wrong target, or too few heads.
    """
    folder, config = check_heads(
        path,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        fingerprint=fingerprint,
        num_draft_tokens=num_draft_tokens,
    )
    module = _empty_heads(config)
    weights, expected = _read_weights(folder), module.state_dict()
    # Copies: what is read is mapped from the file, and who copies new heads over it changes, or
    # ends, a server that runs.
    weights = {name: value.to(expected[name].dtype, copy=True) for name, value in weights.items()}
    module.load_state_dict(weights, assign=True)
    return config, module.eval().requires_grad_(False)


def check_heads(
    path: str | Path,
    *,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    fingerprint: str | None = None,
    num_draft_tokens: int | None = None,
) -> tuple[Path, HeadsConfig]:
    """As :func:`load_heads`, reading no weights; where the heads are, and what they are."""
    folder = _find_folder(path)
    config = read_config(folder)
    if not (folder / WEIGHTS_NAME).is_file():
        raise SpecExtError(f"no {WEIGHTS_NAME} in {folder}; {_AGAIN}")
    _check_target(folder, config, hidden_size, vocab_size, fingerprint)
    if num_draft_tokens is not None and num_draft_tokens > config.num_heads:
        raise SpecExtError(
            f"{folder} holds {config.num_heads} heads, but {num_draft_tokens} draft tokens were "
            f"asked for; set num_speculative_tokens to {config.num_heads} or less, or train more "
            f"heads (vllm-spec train blockwise --num-heads {num_draft_tokens})"
        )
    _check_weights(folder, config)
    return folder, config


def same_shape(one: BlockwiseHeads, other: BlockwiseHeads) -> bool:
    """Whether heads can take each other's place: all but their weights and origin is the same."""
    apart = {"target", "training"}
    if one.config.model_dump(exclude=apart) != other.config.model_dump(exclude=apart):
        return False
    if one.draft_vocab is None or other.draft_vocab is None:
        return one.draft_vocab is other.draft_vocab
    return torch.equal(one.draft_vocab.cpu(), other.draft_vocab.cpu())


def read_config(folder: Path) -> HeadsConfig:
    """``config.json`` of a heads folder; raises SpecExtError if it is missing or damaged."""
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise SpecExtError(
            f"no {CONFIG_NAME} in {folder}; expected a folder made by 'vllm-spec train blockwise'"
        )
    check_readable(file)
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or given.get("model_type") != "vllm_spec_ext_blockwise":
            found = given.get("model_type") if isinstance(given, dict) else type(given).__name__
            raise SpecExtError(
                f"{file} has model_type {found!r}, expected 'vllm_spec_ext_blockwise'; 'model' of "
                "the method blockwise is the folder of the heads, not of the target"
            )
        return HeadsConfig.model_validate(given)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecExtError(f"{file} is damaged ({error}); {_AGAIN}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecExtError(
            f"{file}: {where}: {first['msg']}; found {first['input']!r}. The heads were written by "
            "another version, or edited; upgrade this package or train them again"
        ) from error


def _find_folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    name = str(path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/"):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(name, allow_patterns=[CONFIG_NAME, WEIGHTS_NAME]))
        except Exception as error:
            raise SpecExtError(
                f"heads {name!r} are neither a folder here nor readable from the Hugging Face Hub "
                f"({type(error).__name__}: {error})"
            ) from error
    raise SpecExtError(
        f"no such folder: {folder} (looked in {Path.cwd()}); expected a folder made by "
        "'vllm-spec train blockwise', or a Hub name like 'user/heads'"
    )


def _check_target(
    folder: Path,
    config: HeadsConfig,
    hidden_size: int | None,
    vocab_size: int | None,
    fingerprint: str | None,
) -> None:
    wrong = []
    if hidden_size is not None and hidden_size != config.hidden_size:
        wrong.append(f"hidden size {config.hidden_size} (the target has {hidden_size})")
    if vocab_size is not None and vocab_size != config.vocab_size:
        wrong.append(f"a vocabulary of {config.vocab_size} (the target has {vocab_size})")
    known = fingerprint is not None and config.tokenizer_fingerprint is not None
    if known and fingerprint != config.tokenizer_fingerprint:
        theirs, ours = str(config.tokenizer_fingerprint)[:19], str(fingerprint)[:19]
        wrong.append(f"another tokenizer (fingerprint {theirs}…, the target's is {ours}…)")
    if wrong:
        raise SpecExtError(
            f"{folder} does not fit the target: trained for {config.target} with {'; '.join(wrong)}"
            "; serve the model that the heads were trained for, or train heads for this one"
        )


def _empty_heads(config: HeadsConfig) -> BlockwiseHeads:
    """Without memory: a damaged config may ask for more than there is.

    And nothing is drawn: heads that are read on one rank of several would move its random numbers
    away from those of the others.
    """
    with torch.device("meta"):
        return BlockwiseHeads(config)


def _check_weights(folder: Path, config: HeadsConfig) -> None:
    """Refuse a file that is not whole, or another than config.json says; reads no weights."""
    file = folder / WEIGHTS_NAME
    with reading(file, _AGAIN):
        shapes, listed = shapes_and_ids(file)
    heads = _empty_heads(config).state_dict()
    expected = {name: tuple(value.shape) for name, value in heads.items()}
    if shapes != expected:
        raise SpecExtError(
            f"{file} does not match {CONFIG_NAME}: found {shapes}, expected {expected}; "
            "both files must come from the same training run"
        )
    problem = None if listed is None else ids_problem(listed, config.vocab_size)
    if problem is not None:
        raise SpecExtError(f"{file}: {problem}; {_AGAIN}")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    file = folder / WEIGHTS_NAME
    with reading(file, _AGAIN):
        found = load_file(file)
    for name, value in found.items():
        if not bool(torch.isfinite(value).all()):
            raise SpecExtError(
                f"{file}: {name} holds values that are not finite; train the heads again"
            )
    return found
