# SPDX-License-Identifier: Apache-2.0
"""The target: a Hugging Face model that gives final hidden states and projects them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_spec_ext.errors import SpecExtError


def pick_device(name: str) -> torch.device:
    """``auto`` = the GPU if there is one; raises SpecExtError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SpecExtError(
            f"device {name!r} is unknown; expected auto, cpu, cuda or cuda:0"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecExtError(
            f"device {name!r} was asked for, but torch sees no GPU; use --device cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SpecExtError(
            f"device {name!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs; "
            "counting starts at cuda:0"
        )
    mps = device.type == "mps" and torch.backends.mps.is_available()
    if device.type not in ("cpu", "cuda") and not mps:
        raise SpecExtError(
            f"device {name!r} cannot be used here; expected auto, cpu, cuda or cuda:0"
        )
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` = bfloat16 on a GPU, float32 elsewhere (most CPUs emulate bfloat16)."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


_MOST_DIVERGENCE = 0.05  # of the projection from the model; rounding in bfloat16 gives far less


class Target:
    """A Hugging Face causal LM, split into what heads need: states, projection, embedding."""

    def __init__(self, model: nn.Module, name: str) -> None:
        """Wrap a loaded model.

        Raises:
            SpecExtError: The model's projection of its final states is not its output, or it
                lacks one of the parts.
        """
        self.model: Any = model
        self.name = name
        text_config = self.model.config.get_text_config()
        self.hidden_size = int(text_config.hidden_size)
        self.vocab_size = int(text_config.vocab_size)
        self.num_layers = int(text_config.num_hidden_layers)
        self.context = _context(self.model.config)
        self._head: nn.Module | None = self.model.get_output_embeddings()
        self._embedding: nn.Module = self.model.get_input_embeddings()
        self._check()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def tied(self) -> bool:
        """Whether the vocabulary projection is the embedding."""
        head: Any = self._head
        return head.weight is self._embedding.weight

    def hidden(
        self,
        token_ids: Tensor,  # [batch, length] int64, right-padded
        mask: Tensor,  # [batch, length] int64, 1 = a real token
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """Hidden states of every token.

        Args:
            token_ids: The texts.
            mask: Which tokens are real.
            layers: What to give: i = the residual stream after i layers, before any norm (vLLM's
                auxiliary hidden state i; 0 = the embedding). None = the final state, after the
                last norm.

        Returns:
            [batch, length, hidden_size * number of layers], side by side in the order asked for.

        Raises:
            SpecExtError: ``layers`` of a model that is no plain decoder.
        """
        given = {"input_ids": token_ids, "attention_mask": mask, "use_cache": False}
        if layers is None:
            return self.model.base_model(**given).last_hidden_state
        last: list[Any] = []  # transformers gives the stream behind the last layer only normed
        hook = self.layer_list()[-1].register_forward_hook(
            lambda _, __, output: last.append(output)
        )
        try:
            inner = self.model.base_model(**given, output_hidden_states=True).hidden_states
        finally:
            hook.remove()
        behind = last[0][0] if isinstance(last[0], tuple) else last[0]
        states = [*inner[: self.num_layers], behind]
        return torch.cat([states[layer] for layer in layers], dim=-1)

    def layer_list(self) -> nn.ModuleList:
        """The model's layers; raises SpecExtError if it is no plain decoder."""
        found = [
            module
            for module in self.model.base_model.modules()
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers
        ]
        if len(found) != 1:
            raise SpecExtError(
                f"{self.name} has {len(found)} lists of {self.num_layers} layers, expected one; "
                "single layers are known of plain decoder models only"
            )
        return found[0]

    def final_states(self, behind_last: Tensor) -> Tensor:
        """[..., hidden_size] the last norm of the stream behind the last layer.

        Raises:
            SpecExtError: The model's last norm is not where Llama and its descendants have it.
        """
        norm = getattr(self.model.base_model, "norm", None)
        if norm is None:
            raise SpecExtError(
                f"{self.name} has no module `norm` behind its layers, as Llama and its descendants "
                "have; states of its last layer cannot be made to final ones"
            )
        found: Tensor = norm(behind_last.to(norm.weight.dtype))
        return found

    def project(self, states: Tensor) -> Tensor:
        """Logits [n, vocab_size] of states [n, hidden_size] by the target's own projection."""
        assert self._head is not None
        return self._head(states.to(next(self._head.parameters()).dtype))

    def project_to(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """Logits [n, m] of the tokens ``token_ids`` [m] alone."""
        head: Any = self._head
        bias = getattr(head, "bias", None)
        rows = head.weight[token_ids]
        return functional.linear(
            states.to(rows.dtype), rows, None if bias is None else bias[token_ids]
        )

    def project_own(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """Logit [n] of one token of each row; `token_ids` [n]."""
        head: Any = self._head
        bias = getattr(head, "bias", None)
        logits = (states.float() * head.weight[token_ids].float()).sum(-1)
        return logits if bias is None else logits + bias[token_ids].float()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [n, hidden_size] of token ids [n]; detached, also when fine-tuning.

        Rows of the table: that is what engines share with drafters, also where a model scales them.
        """
        with torch.no_grad():
            table: Tensor = self._embedding.weight
            return functional.embedding(token_ids, table)

    def _check(self) -> None:
        """Some models scale states or logits in between; heads trained past that would be wrong."""
        if self._head is None:
            raise SpecExtError(f"{self.name} has no output projection; it is not a causal LM")
        ids = torch.arange(16, device=self.device).remainder(self.vocab_size).unsqueeze(0)
        with torch.inference_mode():
            expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
            found = self.project(self.hidden(ids, torch.ones_like(ids))[0]).float()
        agree = (expected.argmax(-1) == found.argmax(-1)).float().mean().item()
        if agree < 0.9:  # not 1: ties break differently in low precision
            raise SpecExtError(
                f"{self.name}: projecting its final hidden states gives other tokens than the "
                f"model itself ({agree:.0%} agree); what is trained here shares that projection, "
                "so it would learn wrong tokens. Choose another target"
            )
        true, own = expected.log_softmax(-1), found.log_softmax(-1)
        divergence = (true.exp() * (true - own)).sum(-1).mean().item()
        if divergence > _MOST_DIVERGENCE:
            raise SpecExtError(
                f"{self.name}: its logits are not those of its projection (found a divergence of "
                f"{divergence:.2f}, expected 0): it scales or caps them behind it. What is trained "
                "here would be as sure as the projection, and not as the model; choose another "
                "target"
            )


def load_target(
    name: str, device: torch.device, dtype: torch.dtype, *, frozen: bool = True
) -> Target:
    """Load a target from a folder or the Hugging Face Hub.

    Raises:
        SpecExtError: It cannot be loaded, or is not suited (see :class:`Target`).
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise SpecExtError(f"cannot load the target {name!r}: {error}") from error
    except SafetensorError as error:
        raise SpecExtError(
            f"the weights of the target {name!r} are damaged ({error}); download or copy them again"
        ) from error
    model = model.to(device).eval().requires_grad_(not frozen)
    return Target(model, name)


def context_of(name: str) -> int | None:
    """Tokens that a model can see, from its configuration alone; None = it does not say."""
    from transformers import AutoConfig

    try:
        return _context(AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise SpecExtError(f"cannot load the target {name!r}: {error}") from error


def _context(config: Any) -> int | None:
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def load_tokenizer(name: str) -> Any:
    """The target's tokenizer; raises SpecExtError if it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        hint = "" if not Path(name).is_dir() else " (is tokenizer.json in the folder?)"
        raise SpecExtError(f"cannot load the tokenizer of {name!r}{hint}: {error}") from error
