# SPDX-License-Identifier: Apache-2.0
"""From the user's JSON to the configuration object that vLLM carries into every process.

Inside vLLM our methods are its official ``custom_class`` (vLLM 0.32
``SpeculativeConfig.__post_init__``), which makes it take the V1 runner, leave asynchronous
scheduling off and build our drafter itself; or, on its V2 runner, its ``ngram_gpu``, whose drafter
our worker replaces (:mod:`.runners`).
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

from pydantic import BaseModel, ConfigDict, SerializeAsAny, SkipValidation
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_spec_ext import compat
from vllm_spec_ext.engine.models.draft_config import draft_configs
from vllm_spec_ext.engine.models.memory_check import check_memory
from vllm_spec_ext.engine.requests.door import install_request_validation
from vllm_spec_ext.engine.starting import scheduling
from vllm_spec_ext.engine.starting.arrival import Arrival
from vllm_spec_ext.engine.starting.given_arguments import is_server
from vllm_spec_ext.engine.starting.limits import (
    refuse_async,
    refuse_installed_processors,
    refuse_processed_logprobs,
    refuse_short_prefills,
    refuse_unsupported,
    warn_of_requests,
    worker_class,
)
from vllm_spec_ext.engine.starting.lora_room import batch_limits, leave_room_for_adapters
from vllm_spec_ext.engine.starting.online_checks import check_online, is_on_ray
from vllm_spec_ext.engine.starting.runners import RunnerChoice, choose_runner
from vllm_spec_ext.engine.starting.target_tokenizer import load_tokenizer
from vllm_spec_ext.engine.views.view_checks import check_views, wanted_views
from vllm_spec_ext.engine.watching.served_requests import install_watch
from vllm_spec_ext.engine.watching.stat_logger import install_stat_logger
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import MethodOptions, OnlineOptions
from vllm_spec_ext.parsed_method import parse_method, with_underscores
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import TargetFacts
from vllm_spec_ext.scorers.options import ScorerOptions
from vllm_spec_ext.scorers.parse import check_rule

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_spec_ext.engine.models.draft_config import DraftConfig
    from vllm_spec_ext.proposers.views import ViewSpec

V2_METHOD = "ngram_gpu"
DRAFTER_CLASS = "vllm_spec_ext.engine.drafting.drafter.Drafter"


class MethodSettings(BaseModel):
    """The method that was asked for and its validated options."""

    model_config = ConfigDict(frozen=True)

    method: str
    options: SerializeAsAny[MethodOptions]
    rule: SerializeAsAny[ScorerOptions] | None = None
    """Acceptance rule; None is the exact, lossless one."""
    share_unsalted: bool = False
    """Requests without a ``cache_salt`` share what proposers learn of their tokens."""
    runner: str = ""
    """vLLM's model runner and why, for the start-up line."""
    synchronous_because: str | None = None
    """Why no step is prepared while another runs, for the same line; None = it is."""
    online: OnlineOptions | None = None
    """How the drafter learns while it serves; None = it does not."""

    @property
    def lossless(self) -> bool:
        """Whether the output is the target's own: method and rule both say so."""
        return registry.info(self.method).lossless and (self.rule is None or self.rule.is_strict)

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts may branch, with the method's options."""
        return registry.info(self.method).drafts_trees(self.options)


@config(repr=False)
class SpecExtConfig(SpeculativeConfig):
    """vLLM's speculative configuration with our method beside it; travels by pickle.

    It holds nothing that belongs to a process or a machine: Ray Serve builds it in a task on any
    node of a cluster, and runs the engine elsewhere.
    """

    spec_ext: SkipValidation[MethodSettings] = None  # type: ignore[assignment]
    """Method and options of vllm-spec-ext."""

    draft_models: SkipValidation[tuple[Any, ...]] = ()
    """Of type DraftConfig: draft models that the method runs beside the target."""

    cache_views: SkipValidation[tuple[Any, ...]] = ()
    """Of type ViewSpec: views of its cache over which the target drafts."""

    def __repr__(self) -> str:
        return (
            f"SpecExtConfig(method={self.spec_ext.method!r}, "
            f"num_speculative_tokens={self.num_speculative_tokens}, "
            f"options={self.spec_ext.options!r}, rule={self.spec_ext.rule!r})"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Arrive with our words where this package, or the method's, is missing."""
        return Arrival(type(self.spec_ext.options).__module__), (), self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrived, or copied: in a front end that did not build it, do what building does there.

        In engines and workers that is of no use, and takes 0.03 s: what the process is cannot be
        told where configurations are read before it has begun.
        """
        self.__dict__.update(state)
        set_up_front_end()

    def compute_hash(self) -> str:
        """Of the target's compiled graph, as vLLM's: one that hands out states of its layers.

        vLLM names the methods of its own that read such states (0.32
        ``SpeculativeConfig.compute_hash``). Without this the target of an engine that reads them
        came from the compilation cache of one that does not, and the engine did not start.
        """
        vllms = super().compute_hash()
        models: Sequence[DraftConfig] = self.draft_models
        read = [model.reads.layers for model in models if model.reads and model.reads.num_states]
        return hashlib.sha256(f"{vllms} {read}".encode()).hexdigest() if read else vllms

    @property
    def lossless(self) -> bool:
        """Whether method and acceptance rule leave the target's output as it is."""
        return self.spec_ext.lossless

    @property
    def rule(self) -> str:
        """The acceptance rule, as metrics name it."""
        return "exact" if self.lossless else str(self.spec_ext.rule)

    @property
    def needs_scratch_blocks(self) -> bool:
        """Whether drafts need KV blocks beside those of requests."""
        return self.spec_ext.drafts_trees or bool(self.draft_models or self.cache_views)

    @property
    def reader_names(self) -> list[str]:
        """Draft models and views, as metrics name them."""
        models: Sequence[DraftConfig] = self.draft_models
        views: Sequence[ViewSpec] = self.cache_views
        return [*(model.name for model in models), *(view.name for view in views)]


def shares_unsalted(asked: bool | None, engine_args: Any) -> bool:
    """Whether requests without a ``cache_salt`` share what proposers learn of their tokens.

    Offline one program sends all requests. A server's clients may be strangers to each other, so
    there the operator has to say that they are not.

    Args:
        asked: The option; None = not given.
        engine_args: ``EngineArgs``, or a server's ``AsyncEngineArgs``.
    """
    return not is_server(engine_args) if asked is None else asked


def build_spec_config(
    engine_args: "EngineArgs",
    method: str,
    target_model_config: "ModelConfig",
    target_parallel_config: "ParallelConfig",
) -> SpecExtConfig:
    """What the wrapped ``EngineArgs.create_speculative_config`` returns for our methods.

    Runs in the front end before any weight is loaded. Besides building the configuration it sets
    ``parallel_config.worker_cls`` and makes the front end check per-request options.

    Raises:
        SpecExtError: Bad options, or settings that our methods do not work with.
    """
    compat.require()
    # create_engine_config may run twice on the same arguments; vLLM's own step leaves two behind.
    left_behind = ("target_model_config", "target_parallel_config")
    asked = engine_args.speculative_config or {}
    given = with_underscores({k: value for k, value in asked.items() if k not in left_behind})
    for flag, key in (
        ("spec_method", "method"),
        ("spec_model", "model"),
        ("spec_tokens", "num_speculative_tokens"),
    ):
        value = getattr(engine_args, flag, None)
        if value is None:
            continue
        if given.get(key, value) != value:
            raise SpecExtError(
                f"{key}: found {given[key]!r} in speculative_config and {value!r} in "
                f"--{flag.replace('_', '-')}; give it once"
            )
        given[key] = value
    parsed = parse_method(given, method)
    refuse_unsupported(engine_args, method, target_model_config, target_parallel_config)
    warn_of_requests(engine_args, target_model_config)
    if engine_args.enable_lora:
        leave_room_for_adapters(
            batch_limits(engine_args, target_model_config, target_parallel_config),
            method,
            parsed.vllm_options,
            is_given="num_speculative_tokens" in parsed.given,
        )
    runner = choose_runner(engine_args, method, target_parallel_config)
    refuse_async(engine_args, method, runner)
    refuse_installed_processors(method, runner)
    synchronous_because = scheduling.settle(engine_args, target_parallel_config, runner, parsed)
    if not parsed.vllm_options.get("num_speculative_tokens_per_batch_size"):
        refuse_short_prefills(engine_args, method, parsed.vllm_options["num_speculative_tokens"])
    check_rule(parsed.rule, parsed.allow_lossy, target_model_config.get_vocab_size())
    share_unsalted = shares_unsalted(parsed.share_unsalted, engine_args)
    facts = TargetFacts(
        model=target_model_config.model,
        vocab_size=target_model_config.get_vocab_size(),
        hidden_size=target_model_config.get_hidden_size() or None,
        num_speculative_tokens=parsed.vllm_options["num_speculative_tokens"],
        load_tokenizer=partial(load_tokenizer, target_model_config),
        share_unsalted=share_unsalted,
    )
    proposer = registry.load(method)
    proposer.check(parsed.options, facts)
    if parsed.online is not None:
        check_online(
            parsed.online,
            method,
            proposer,
            parsed.options,
            share_unsalted,
            target_model_config,
            on_ray=is_on_ray(target_parallel_config.distributed_executor_backend),
        )
    all_views = proposer.views(parsed.options)
    views = wanted_views(all_views)
    check_views(views, method, engine_args, target_model_config, target_parallel_config)
    # A method without its view is off, and its models with it.
    models = proposer.models(parsed.options) if len(views) == len(all_views) else ()
    draft_models = draft_configs(models, target_model_config, target_parallel_config)
    check_memory(
        engine_args,
        target_model_config,
        target_parallel_config,
        draft_models,
        tree=parsed.info.drafts_trees(parsed.options),
        num_draft_tokens=parsed.vllm_options["num_speculative_tokens"],
    )
    settings = MethodSettings(
        method=parsed.info.name,
        options=parsed.options,
        rule=parsed.rule,
        share_unsalted=share_unsalted,
        runner=str(runner),
        synchronous_because=synchronous_because,
        online=parsed.online,
    )
    if not settings.lossless:
        refuse_processed_logprobs(target_model_config)
    result = SpecExtConfig(
        **internal_method(runner),
        target_model_config=target_model_config,
        target_parallel_config=target_parallel_config,
        spec_ext=settings,
        draft_models=draft_models,
        cache_views=views,
        **parsed.vllm_options,
    )
    target_parallel_config.worker_cls = worker_class()
    set_up_front_end()
    return result


def internal_method(runner: RunnerChoice) -> dict[str, Any]:
    """What our method is inside vLLM, on this runner."""
    if not runner.is_v2:
        return {"method": "custom_class", "model": DRAFTER_CLASS}
    return {"method": V2_METHOD}


def set_up_front_end() -> None:
    """Check options of requests in this process, and show what workers count; idempotent."""
    install_request_validation()
    install_watch()
    install_stat_logger()
