# SPDX-License-Identifier: Apache-2.0
"""Stage 1: what the target itself would write, as training text.

Sequence-level distillation (Stern et al. 2018, sec. 6.2) made the paper's blocks longer, and
exact acceptance compares drafts with the target's own choice, not with a human's.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vllm_spec_ext.atomic import disk_full_named
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import tokenizer_fingerprint
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.training.prompts import read_prompts
from vllm_spec_ext.training.provenance import record_command
from vllm_spec_ext.training.record_states import METHOD, collect, forget_states
from vllm_spec_ext.training.schema import Training
from vllm_spec_ext.training.shards import (
    TokenSequence,
    open_manifest,
    read_data,
    shard_path,
    states_path,
    write_shard,
    write_states,
)
from vllm_spec_ext.training.target import context_of, pick_device
from vllm_spec_ext.training.weights_fingerprint import weights_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECORDING = "recording"  # folder for the states of the requests that are running


class Generator(Protocol):
    """Continues prompts with the target."""

    def __call__(self, prompts: Sequence[list[int]], /) -> list[list[int]]:
        """Continuations, without the prompts, an end token included where one was produced."""


def tokenise_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    config: Training,
    report: Callable[[str], None] = print,
) -> list[list[int]]:
    """Prompt token ids as the target would see them, too long ones left out.

    Raises:
        SpecExtError: A chat template was demanded and there is none, or no prompt is left.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if config.chat == "always" and not has_template:
        raise SpecExtError(f"{config.model} has no chat template; drop --chat always")
    chat = not config.raw_text and config.chat != "never" and has_template
    encoded = []
    for prompt in prompts:
        text = prompt
        if chat:
            message = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, tokenize=False
            )
        # A template writes its own start token.
        encoded.append(tokenizer(text, add_special_tokens=not chat)["input_ids"])
    limit = config.max_length if config.raw_text else config.longest_prompt
    if config.raw_text:
        pieces = [ids[i : i + limit] for ids in encoded for i in range(0, len(ids), limit)]
    else:
        pieces = [ids for ids in encoded if len(ids) <= limit]
        if len(pieces) < len(encoded):
            report(
                f"data: {len(encoded) - len(pieces)} of {len(encoded)} prompts are left out, "
                f"longer than {limit} tokens ({_prompt_bound(config)})"
            )
    pieces = [ids for ids in pieces if ids]
    if not pieces:
        raise SpecExtError(
            f"all {len(prompts)} prompts are empty or longer than {limit} tokens; raise "
            f"{_prompt_bound(config)}"
        )
    return pieces


def _memory_share() -> float:
    """Of a CPU's memory for vLLM: half of what is free, which suffices for any batch.

    vLLM would ask for 0.92 of it all and refuse to start beside another program.
    """
    import psutil

    memory = psutil.virtual_memory()
    return max(0.05, round(0.5 * memory.available / memory.total, 2))


def _prompt_bound(config: Training) -> str:
    """The flag that decides which prompts are too long."""
    if config.longest_prompt == config.max_prompt_tokens:
        return f"--max-prompt-tokens {config.max_prompt_tokens}"
    return f"--max-length {config.max_length}, which needs two more tokens to learn from"


def make_data(
    config: Training,
    tokenizer: Any,
    generator: Callable[[], Generator],
    report: Callable[[str], None] = print,
) -> None:
    """Fill the data folder shard by shard; shards that exist are kept.

    Args:
        config: The run's settings.
        tokenizer: The target's Hugging Face tokenizer.
        generator: Called once, and only if something is to be generated.
        report: Receives progress lines.

    Raises:
        SpecExtError: Bad prompts, or the folder holds data of other settings.
        DiskFullError: All shards before the present one are kept.
    """
    prompts = tokenise_prompts(
        tokenizer,
        read_prompts(config.prompts, config.field, config.max_prompts, config.seed),
        config,
        report,
    )
    if config.generator == "transformers" and not config.raw_text:
        check_context(config, max(map(len, prompts)))
    per_shard = config.prompts_per_shard
    num_shards = -(-len(prompts) // per_shard)
    folder = config.data_folder
    manifest = _manifest(config, tokenizer, prompts, num_shards)
    open_manifest(folder, manifest)
    todo = [i for i in range(num_shards) if not shard_path(folder, i).exists()]
    if not todo:
        report(f"data: all {num_shards} shards are there ({folder})")
        return
    record_command(folder, pick_device(config.device), config.model_dump(mode="json"), manifest)
    generate = None if config.raw_text else generator()
    for done, index in enumerate(todo, start=1):
        batch = prompts[index * per_shard : (index + 1) * per_shard]
        if generate is None:
            sequences = [TokenSequence(ids, 1) for ids in batch]
        else:
            pairs = zip(batch, generate(batch), strict=True)
            sequences = [TokenSequence([*ids, *more], len(ids)) for ids, more in pairs]
        states = getattr(generate, "states", None)
        if states is not None:  # before the shard, whose presence says that all is there
            write_states(states_path(folder, index), states)
        else:  # those of a former shard would be taken for this one's
            states_path(folder, index).unlink(missing_ok=True)
        write_shard(shard_path(folder, index), sequences)
        new = sum(len(s.token_ids) - s.prompt_length for s in sequences)
        report(
            f"data: shard {index + 1} of {num_shards}, {new} new tokens "
            f"({done}/{len(todo)} of this run)"
        )
    data = read_data(folder)
    report(f"data: {len(data)} sequences, {len(data.token_ids)} tokens ({folder})")


def check_context(config: Training, longest: int) -> None:
    """Refuse prompts that the target cannot continue as far as asked; vLLM checks that itself."""
    context = context_of(config.model)
    if context is not None and longest + config.max_new_tokens > context:
        raise SpecExtError(
            f"the longest prompt has {longest} tokens, and --max-new-tokens "
            f"{config.max_new_tokens} more do not fit in the context of {context} of "
            f"{config.model}; lower one of --max-new-tokens and --max-prompt-tokens"
        )


def _manifest(
    config: Training, tokenizer: Any, prompts: list[list[int]], num_shards: int
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update((",".join(map(str, ids)) + "\n").encode())
    return {
        "kind": "raw text" if config.raw_text else "distilled",
        "model": config.shown_target,
        "weights": None if config.raw_text else weights_fingerprint(config.model),
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "prompt_files": [path.name for path in config.prompts],
        "prompts_sha256": digest.hexdigest(),
        "num_prompts": len(prompts),
        "num_shards": num_shards,
        "prompts_per_shard": config.prompts_per_shard,
        "max_new_tokens": 0 if config.raw_text else config.max_new_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
    }


def vllm_generator(config: Training) -> Generator:
    """Continues with vLLM: the fastest way, on the machine that serves.

    Raises:
        SpecExtError: vLLM is not installed.
    """
    try:
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.platforms import current_platform
    except ImportError as error:
        raise SpecExtError(
            f"generating data with vLLM failed at its import ({error}); install vllm, or use "
            "--generator transformers"
        ) from error
    length = config.longest_prompt + config.max_new_tokens
    on_cpu = current_platform.is_cpu()
    recorder: dict[str, Any] = {}
    folder = config.data_folder / RECORDING
    if config.records_states:
        # The engine must live in this process, where the recording method is known.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        registry.BUILTIN[METHOD] = "vllm_spec_ext.training.record_states:RecordStates"
        folder.mkdir(parents=True, exist_ok=True)
        forget_states(folder)
        recorder = {"speculative_config": {"method": METHOD, "folder": str(folder)}}
    given = {"bf16": "bfloat16", "fp32": "float32", "auto": "float32" if on_cpu else "auto"}
    try:
        engine = LLM(
            config.model,
            max_model_len=length,
            dtype=given[config.dtype],
            enforce_eager=on_cpu,  # compiling takes minutes there and gains little
            **({"gpu_memory_utilization": _memory_share()} if on_cpu else {}),
            **recorder,
        )
    except ValueError as error:  # e.g. a context shorter than that, with vLLM's own explanation
        raise SpecExtError(
            f"vLLM cannot serve {config.model} with a context of {length} tokens "
            f"(prompts of {_prompt_bound(config)}, and --max-new-tokens): {error}"
        ) from error

    def sampling(seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=config.temperature, max_tokens=config.max_new_tokens, seed=seed
        )

    class FromVllm:
        """Continuations, and the states that were recorded with the last ones."""

        states: list[Any] | None = None

        def __call__(self, prompts: Sequence[list[int]]) -> list[list[int]]:
            inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
            with disk_full_named(folder):  # what records the states writes them there
                params = [sampling(seed) for seed in request_seeds(config.seed, prompts)]
                outputs = engine.generate(inputs, params, use_tqdm=False)
            texts = [list(output.outputs[0].token_ids) for output in outputs]
            if recorder:
                # Requests that ended are reported to the worker with the next step.
                one = SamplingParams(max_tokens=1)
                with disk_full_named(folder):
                    engine.generate(inputs[:1], one, use_tqdm=False)
                hidden_size = engine.model_config.get_hidden_size()
                self.states = [
                    collect(folder, output.request_id, len(text), hidden_size)
                    for output, text in zip(outputs, texts, strict=True)
                ]
                forget_states(folder)  # of the requests in between
            return texts

    return FromVllm()


def request_seeds(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """A seed for each of these prompts: prompts that are alike get answers that are not.

    The same again for the same prompts, as when a run is resumed.
    """
    drawn = zlib.crc32(str([list(prompt) for prompt in prompts]).encode())
    states = np.random.SeedSequence([seed, drawn]).generate_state(len(prompts))
    return [int(state) for state in states]


def transformers_generator(config: Training, model: "PreTrainedModel") -> Generator:
    """Continues with Hugging Face ``generate`` in batches of similar length, left-padded.

    Args:
        config: The run's settings.
        model: Hugging Face causal LM, on its device.
    """
    import torch

    ends = model.generation_config.eos_token_id
    end_ids = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    pad = min(end_ids) if end_ids else 0

    def one_batch(prompts: Sequence[list[int]]) -> Iterator[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor(
            [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device
        )
        torch.manual_seed(request_seeds(config.seed, prompts)[0])
        sampling: dict[str, Any] = {"do_sample": config.temperature > 0.0}
        if config.temperature > 0.0:
            sampling.update(temperature=config.temperature, top_k=0, top_p=1.0)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=config.max_new_tokens,
                pad_token_id=pad,
                repetition_penalty=1.0,
                **sampling,
            )
        for row in output[:, width:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in end_ids), len(row))
            yield row[:end]

    def generate(prompts: Sequence[list[int]]) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        results: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), config.generate_batch):
            batch = order[start : start + config.generate_batch]
            for i, more in zip(batch, one_batch([prompts[i] for i in batch]), strict=True):
                results[i] = more
        return results

    return generate
