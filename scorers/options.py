# SPDX-License-Identifier: Apache-2.0
"""Options of the acceptance rules, told apart by ``type``, and of eta sampling."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from vllm_spec_ext.options import Options


class ExactRule(Options):
    """Lossless: a draft token stands only if the target chose it."""

    type: Literal["exact"] = "exact"


class TopKRule(Options):
    """A draft token stands if it is among the target's ``k`` best (Stern et al. 2018, 5.1)."""

    type: Literal["top_k"] = "top_k"

    k: int = Field(ge=1)
    """How many best tokens are tolerated; 1 is the exact rule."""


class DistanceRule(Options):
    """A draft token stands if it is near the target's choice (Stern et al. 2018, 5.2)."""

    type: Literal["distance"] = "distance"

    epsilon: float = Field(ge=0, allow_inf_nan=False)
    """Largest tolerated distance; 0 is the exact rule."""

    table: Annotated[str, StringConstraints(min_length=1)] | None = None
    """The metric: a .npy or .safetensors file of shape [vocab, vocab] (target, draft) or [vocab]
    (one value a token), or ``module:function``. Without it, the difference of token ids."""


class MinBlockRule(Options):
    """At least ``length`` tokens a step, right or wrong (Stern et al. 2018, 5.3)."""

    type: Literal["min_block"] = "min_block"

    length: int = Field(ge=1)
    """Tokens a step, the target's own one included; 1 is the exact rule."""


class ToleranceRule(Options):
    """GAD++: among the ``beta`` best tokens and at most ``tau`` behind the best one."""

    type: Literal["tolerance"] = "tolerance"

    beta: int = Field(default=3, ge=1)
    """How many best tokens are tolerated; 1 is the exact rule."""

    tau: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Largest tolerated gap to the best token's log-probability, in nats of the untempered
    distribution; 0 is the exact rule."""


SingleRule = Annotated[
    ExactRule | TopKRule | DistanceRule | MinBlockRule | ToleranceRule,
    Field(discriminator="type"),
]


class AnyOfRule(Options):
    """A draft token stands if at least one of the rules tolerates it."""

    type: Literal["any_of"] = "any_of"

    rules: tuple[SingleRule, ...] = Field(min_length=1)
    """Two or more relaxed rules of different types."""


ScorerOptions = Annotated[
    ExactRule | TopKRule | DistanceRule | MinBlockRule | ToleranceRule | AnyOfRule,
    Field(discriminator="type"),
]
"""Acceptance rule of the engine, told apart by ``type``."""


class EtaOptions(Options):
    """Eta sampling (Hewitt et al. 2022): drop what is noise at the row's entropy."""

    epsilon: float = Field(ge=0, lt=1)
    """Probability below which a token is dropped however flat the distribution; 0 switches the
    sampler off. The authors use 0.0009; 0.0003 to 0.004 is usual."""

    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Weight of the entropy-dependent threshold ``alpha * exp(-entropy)``; the default is the
    square root of ``epsilon``."""
