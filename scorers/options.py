# SPDX-License-Identifier: Apache-2.0
"""Options of the acceptance rules, told apart by ``type``, and of eta sampling.

A rule's class says all that must be known of it without running it: where it is the exact rule,
what a request may make stricter, what contradicts the model. No torch or numba import: the front
end reads rules.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny, StringConstraints

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import Options


class ScorerOptions(Options):
    """Acceptance rule of the engine; base of all of them."""

    type: str
    """Name of the rule, by which it is asked for; each class fixes its own."""

    narrowable: ClassVar[tuple[str, ...]] = ()
    """Parameters that a request may lower: a smaller value is the stricter one."""

    @property
    def is_strict(self) -> bool:
        """Whether these parameters make it the exact rule."""
        return False

    def check(self, vocab_size: int | None, num_speculative_tokens: int | None) -> None:
        """Refuse parameters that contradict each other or the model.

        Args:
            vocab_size: Width of the target's logits; None where it is not known yet.
            num_speculative_tokens: Longest draft; None where it is not known yet.

        Raises:
            SpecExtError: They do.
        """


class ExactRule(ScorerOptions):
    """Lossless: a draft token stands only if the target chose it."""

    type: Literal["exact"] = "exact"

    @property
    def is_strict(self) -> bool:
        """Always."""
        return True


class TopKRule(ScorerOptions):
    """A draft token stands if it is among the target's ``k`` best (Stern et al. 2018, 5.1)."""

    type: Literal["top_k"] = "top_k"
    narrowable = ("k",)

    k: int = Field(ge=1)
    """How many best tokens are tolerated; 1 is the exact rule."""

    @property
    def is_strict(self) -> bool:
        """Only the best one."""
        return self.k == 1

    def check(self, vocab_size: int | None, num_speculative_tokens: int | None) -> None:
        """Not the whole vocabulary."""
        _check_rank(self.type, "k", self.k, vocab_size)


class DistanceRule(ScorerOptions):
    """A draft token stands if it is near the target's choice (Stern et al. 2018, 5.2)."""

    type: Literal["distance"] = "distance"
    narrowable = ("epsilon",)

    epsilon: float = Field(ge=0, allow_inf_nan=False)
    """Largest tolerated distance; 0 is the exact rule."""

    table: Annotated[str, StringConstraints(min_length=1)] | None = None
    """The metric: a .npy or .safetensors file of shape [vocab, vocab] (target, draft) or [vocab]
    (one value a token), or ``module:function``. Without it, the difference of token ids."""

    @property
    def is_strict(self) -> bool:
        """No distance at all."""
        return self.epsilon == 0


class MinBlockRule(ScorerOptions):
    """At least ``length`` tokens a step, right or wrong (Stern et al. 2018, 5.3)."""

    type: Literal["min_block"] = "min_block"
    narrowable = ("length",)

    length: int = Field(ge=1)
    """Tokens a step, the target's own one included; 1 is the exact rule."""

    @property
    def is_strict(self) -> bool:
        """The target's own token only."""
        return self.length == 1

    def check(self, vocab_size: int | None, num_speculative_tokens: int | None) -> None:
        """Not longer than a step can be."""
        if num_speculative_tokens is not None and self.length > num_speculative_tokens + 1:
            raise SpecExtError(
                f"min_block: found length={self.length}, but a step yields at most "
                f"num_speculative_tokens + 1 = {num_speculative_tokens + 1} tokens; lower length"
            )


class ToleranceRule(ScorerOptions):
    """GAD++: among the ``beta`` best tokens and at most ``tau`` behind the best one."""

    type: Literal["tolerance"] = "tolerance"
    narrowable = ("beta", "tau")

    beta: int = Field(default=3, ge=1)
    """How many best tokens are tolerated; 1 is the exact rule."""

    tau: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Largest tolerated gap to the best token's log-probability, in nats of the untempered
    distribution; 0 is the exact rule."""

    @property
    def is_strict(self) -> bool:
        """Only the best one, by rank or by gap."""
        return self.beta == 1 or self.tau == 0

    def check(self, vocab_size: int | None, num_speculative_tokens: int | None) -> None:
        """Not the whole vocabulary."""
        _check_rank(self.type, "beta", self.beta, vocab_size)


def _check_rank(rule: str, name: str, rank: int, vocab_size: int | None) -> None:
    if vocab_size is not None and rank >= vocab_size:
        raise SpecExtError(
            f"{rule}: found {name}={rank}, expected less than the vocabulary of {vocab_size} "
            "tokens; usual values are 2 to 5"
        )


class AnyOfRule(ScorerOptions):
    """A draft token stands if at least one of the rules tolerates it."""

    type: Literal["any_of"] = "any_of"

    rules: tuple[SerializeAsAny[ScorerOptions], ...] = Field(min_length=1)
    """Two or more relaxed rules of different types."""

    @property
    def is_strict(self) -> bool:
        """All of them are."""
        return all(member.is_strict for member in self.rules)

    def check(self, vocab_size: int | None, num_speculative_tokens: int | None) -> None:
        """Every rule must add something to the others."""
        kinds = [member.type for member in self.rules]
        if len(kinds) < 2:
            raise SpecExtError(
                f"any_of: found one rule ({kinds[0]}); give it alone, without any_of"
            )
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise SpecExtError(
                    f"any_of: found {kind} {kinds.count(kind)} times; keep the loosest one"
                )
        for member in self.rules:
            if member.is_strict:
                raise SpecExtError(
                    f"any_of: {member.type} with these parameters is the exact rule, which every "
                    "rule contains; remove it"
                )
        by_kind = {member.type: member for member in self.rules}
        top_k, tolerance = by_kind.get("top_k"), by_kind.get("tolerance")
        if (
            isinstance(top_k, TopKRule)
            and isinstance(tolerance, ToleranceRule)
            and tolerance.beta <= top_k.k
        ):
            raise SpecExtError(
                f"any_of: top_k with k={top_k.k} already tolerates all that tolerance with "
                f"beta={tolerance.beta} does; remove one of them or raise beta above k"
            )
        for member in self.rules:
            member.check(vocab_size, num_speculative_tokens)


class EtaOptions(Options):
    """Eta sampling (Hewitt et al. 2022): drop what is noise at the row's entropy."""

    epsilon: float = Field(ge=0, lt=1)
    """Probability below which a token is dropped however flat the distribution; 0 switches the
    sampler off. The authors use 0.0009; 0.0003 to 0.004 is usual."""

    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Weight of the entropy-dependent threshold ``alpha * exp(-entropy)``; the default is the
    square root of ``epsilon``."""
