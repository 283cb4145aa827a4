# SPDX-License-Identifier: Apache-2.0
"""An ``LLM`` behind the benchmark's small engine interface; the only importer of vLLM here."""

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from vllm_spec_ext.bench.engine_memory import memory_args
from vllm_spec_ext.bench.measure import StepOutput
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.prompts import Message
from vllm_spec_ext.bench.records import EngineCounters, EngineFacts
from vllm_spec_ext.environment import READ_ONLY
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers import registry

COUNTERS = "vllm:spec_decode_num_"
PREEMPTIONS = "vllm:num_preemptions"
REPLACEMENT_CHARACTER = "\ufffd"  # what incomplete UTF-8 decodes to


@dataclass(frozen=True)
class Sampling:
    """How answers are generated, the same for every method."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    raw: bool = False  # send prompts as they are, without the chat template


class VllmEngine:
    """Owns the ``LLM`` of one method."""

    def __init__(
        self,
        model: str,
        method: Method,
        engine_args: Mapping[str, Any],
        sampling: Sampling,
        num_engines: int = 1,
    ) -> None:
        """Start the engine (tens of seconds).

        Args:
            model: Name or folder of the target.
            method: What drafts.
            engine_args: ``LLM`` arguments of the user; they win over the benchmark's defaults.
            sampling: How answers are generated.
            num_engines: Engines that share the machine's memory, this one included.

        Raises:
            SpecExtError: vLLM cannot know the method, or the memory is not enough for all.
        """
        if method.ours:
            _check_plugin(method.name)
        begin = time.perf_counter()
        os.environ[READ_ONLY] = "1"  # every pass starts with the same files, and leaves the user's
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform

        self.method = method
        self.sampling = sampling
        args: dict[str, Any] = {"enable_prefix_caching": False, "disable_log_stats": False}
        if current_platform.is_cpu():
            # Eager: compilation costs minutes and changes little on a CPU. Blocks of 32: the CPU
            # default of 128 makes every copy of a partial block cost four times as much.
            args |= {"enforce_eager": True, "block_size": 32}
        args |= memory_args(
            engine_args,
            cpu=current_platform.is_cpu(),
            num_engines=num_engines,
            default_share=EngineArgs.gpu_memory_utilization,
        )
        if method.config is not None:
            args["speculative_config"] = method.config
            if not method.ours:
                args["worker_extension_cls"] = "vllm_spec_ext.bench.worker_extension.RivalWorker"
        self.llm = LLM(model, **(args | dict(engine_args)))
        config = self.llm.llm_engine.vllm_config
        self.max_model_len: int = config.model_config.max_model_len
        self.tokenizer = self.llm.get_tokenizer()
        self.facts = EngineFacts(
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            lossless=_is_lossless(method, config.speculative_config),
            device=current_platform.get_device_name() or current_platform.device_type,
            start_s=time.perf_counter() - begin,
            kv_tokens=config.cache_config.kv_cache_size_tokens,
        )

    def close(self) -> None:
        """End vLLM's processes in order; killed ones leave shared memory behind in /dev/shm."""
        self.llm.llm_engine.engine_core.shutdown()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Prompt tokens of a conversation.

        Raises:
            SpecExtError: The model has no chat template, or the prompt leaves no room to answer.
        """
        if self.sampling.raw:
            tokens = self.tokenizer.encode("\n\n".join(message["content"] for message in messages))
        else:
            if not getattr(self.tokenizer, "chat_template", None):
                raise SpecExtError(
                    "the model's tokenizer has no chat template; use --raw to send the prompts "
                    "as plain text"
                )
            tokens = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        room = self.max_model_len - self.sampling.max_tokens
        if len(tokens) > room:
            raise SpecExtError(
                f"a prompt of {len(tokens)} tokens ({messages[-1]['content'][:40]!r}...) and "
                f"max_tokens={self.sampling.max_tokens} exceed max_model_len={self.max_model_len}; "
                "raise --max-model-len, lower --max-tokens or drop the prompt"
            )
        return list(tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def pieces(self, token_ids: Sequence[int], num_new: int) -> list[str]:
        """Text that each of the last ``num_new`` tokens adds to an answer.

        A character made of several tokens is given to the last of them.
        """
        texts = [
            self.decode(token_ids[:end]).rstrip(REPLACEMENT_CHARACTER)
            for end in range(len(token_ids) - num_new, len(token_ids) + 1)
        ]
        return [text[len(before) :] for before, text in itertools.pairwise(texts)]

    def add(self, request_id: str, token_ids: Sequence[int], seed: int) -> None:
        """Queue a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampled = self.sampling.temperature > 0
        params = SamplingParams(
            max_tokens=self.sampling.max_tokens,
            temperature=self.sampling.temperature,
            seed=self.sampling.seed + seed if sampled else None,
            output_kind=RequestOutputKind.DELTA,
        )
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(token_ids)}, params)

    def step(self) -> list[StepOutput]:
        """One engine step."""
        return [
            StepOutput(out.request_id, out.outputs[0].token_ids, out.finished)
            for out in self.llm.llm_engine.step()
        ]

    def log_prob(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Sum of the log-probabilities of an answer's tokens under this engine's target."""
        from vllm import SamplingParams

        ids = [*prompt, *answer]
        more: dict[str, Any] = {}
        if len(ids) >= self.max_model_len:
            # vLLM takes no prompt that fills the model. It is made to generate the last token then;
            # the log-probability that it gives is from before it was made to (raw_logprobs).
            more = {"allowed_token_ids": [ids.pop()], "logprobs": 0}
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, **more)
        (out,) = self.llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        rows = list(out.prompt_logprobs or [])[len(prompt) :]
        if more:
            rows += out.outputs[0].logprobs or []
        return sum(
            row[token].logprob for token, row in zip(answer, rows, strict=True) if row is not None
        )

    def forget(self) -> None:
        """Drop what a run could hand to the next one: cached prefixes, learnt drafts.

        Raises:
            RuntimeError: Something was kept, so that the next run would not start cold.
        """
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache: KV blocks are still in use, expected no "
                "request in flight; start the engine again"
            )
        if self.method.ours:
            self._reset_worker("spec_ext_reset")
            self._ask_worker("spec_ext_stats")  # starts a new list of drafter times
        elif self.method.config is not None:
            if self.method.config.get("method") == "suffix":
                self._reset_worker("spec_bench_forget")
            self._ask_worker("spec_bench_propose_us")

    def counters(self) -> EngineCounters:
        """vLLM's counters since the engine started."""
        values: dict[str, Any] = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith(COUNTERS) or metric.name == PREEMPTIONS:
                values[metric.name.removeprefix(COUNTERS)] = getattr(
                    metric, "values", getattr(metric, "value", None)
                )
        return EngineCounters(
            int(values.get("drafts", 0)),
            int(values.get("draft_tokens", 0)),
            int(values.get("accepted_tokens", 0)),
            tuple(values.get("accepted_tokens_per_pos", ())),
            int(values.get(PREEMPTIONS, 0)),
        )

    def propose_us(self) -> tuple[float, ...] | None:
        """Drafter time of each step since the last call; ``None`` if the worker keeps none."""
        if self.method.ours:
            stats = self._ask_worker("spec_ext_stats")
            times = stats.get("propose_us") if isinstance(stats, Mapping) else None
        elif self.method.config is not None:
            times = self._ask_worker("spec_bench_propose_us")
        else:
            times = None
        return None if times is None else tuple(map(float, times))

    def _reset_worker(self, name: str) -> None:
        """Make all workers forget; raises RuntimeError if one fails, refuses or cannot."""
        try:
            answers = self.llm.collective_rpc(name)
        except Exception as error:
            raise RuntimeError(
                f"a worker of {self.method.name!r} failed to forget the last run ({name}): {error}"
            ) from error
        if False in answers:
            raise RuntimeError(
                f"a worker of {self.method.name!r} found nothing to forget the last run in "
                f"({name}); expected the drafter that vLLM 0.32 builds"
            )

    def _ask_worker(self, name: str) -> Any:
        """Answer of the first worker; ``None`` if it has no such method."""
        try:
            return self.llm.collective_rpc(name)[0]
        except Exception as error:
            # The engine core hands a worker's failure on as a plain Exception with its text, this
            # one from vLLM 0.32 v1/serial_utils.py `run_method`.
            if f"Method {name!r} is not implemented" in str(error):
                return None
            raise


def check_configuration(model: str, method: Method, engine_args: Mapping[str, Any]) -> None:
    """Make an engine's configuration, which reads a drafter's files but no weights.

    Raises:
        SpecExtError: They are not for this target, or an option is wrong.
    """
    from vllm.engine.arg_utils import EngineArgs

    args = dict(engine_args)
    EngineArgs(model, speculative_config=method.config, **args).create_engine_config()


def _is_lossless(method: Method, speculative_config: object) -> bool:
    """Whether the text must be plain decoding's; acceptance rules may relax what drafting keeps."""
    stated = getattr(speculative_config, "lossless", None)
    if isinstance(stated, bool):
        return stated
    if method.ours and method.config is not None:
        return registry.info(str(method.config["method"])).lossless
    return True


def _check_plugin(method: str) -> None:
    """Say what is missing instead of vLLM's list of all the methods it knows."""
    found = {entry.name for entry in entry_points(group="vllm.general_plugins")}
    if "spec_ext" not in found:
        raise SpecExtError(
            f"vLLM cannot know {method!r}: the entry point 'spec_ext' of vllm-spec-ext is not "
            f"installed here (found: {', '.join(sorted(found)) or 'none'}); "
            "install the package with pip, or run 'vllm-spec doctor'"
        )
