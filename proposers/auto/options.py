# SPDX-License-Identifier: Apache-2.0
"""Options of ``auto``."""

from functools import cached_property
from typing import Self

from pydantic import Field, model_validator

from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.options import MethodOptions, parse_options
from vllm_spec_ext.proposers.base import BaseProposer
from vllm_spec_ext.proposers.inner_method import InnerMethod

_LOOKED_UP = ("auto", "suffix_tree", "recycling", "input_copy")


class Drafter(InnerMethod):
    """A method with a checkpoint: ``{"method": "blockwise", "model": FOLDER, ...}``."""

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        _ = self.parsed  # refused here, or never
        return self

    def proposer(self) -> type[BaseProposer]:
        """The class of the method.

        Raises:
            SpecExtError: No such method, or one whose sources `auto` has anyway.
        """
        from vllm_spec_ext.proposers import registry  # its classes have options of their own

        known = [name for name in registry.names() if name not in _LOOKED_UP]
        if self.method in _LOOKED_UP:
            raise SpecExtError(
                f"drafter: `auto` has what {self.method} looks up, as options of its own; "
                f"expected one of {', '.join(known)}"
            )
        if self.method not in known:
            raise UnknownNameError("method of the drafter", self.method, known)
        return registry.load(self.method)

    @cached_property
    def parsed(self) -> MethodOptions:
        """The method's options: a tree where it can draft one, of chosen tokens."""
        return self._parse(tree=True)

    @cached_property
    def as_chain(self) -> MethodOptions:
        """The same for drafts without branches, unless they were asked for."""
        return self._parse(tree=False)

    def _parse(self, *, tree: bool) -> MethodOptions:
        schema = self.proposer().info.options
        given = dict(self.options)
        if "tree" in schema.model_fields:
            given.setdefault("tree", tree)
        if "draw" in schema.model_fields and given.setdefault("draw", False) is not False:
            raise SpecExtError(
                f"drafter {self.method}: found draw={given['draw']!r}, expected false; tokens of "
                "several sources are chosen, not drawn, so leave it out"
            )
        return parse_options(schema, given, f"drafter {self.method}")


class AutoOptions(MethodOptions):
    """Options of ``auto`` (all sources of drafts in one tree)."""

    copy_input: bool = True
    """Copy from the request's input, as ``input_copy`` does: from what the request names as its
    source, or from the last user message (on a GPU, with ``own_text``, from all of the chat)."""

    own_text: bool = True
    """Look up what followed where the end of the text occurred in prompt or output before."""

    earlier_answers: int = Field(default=65_536, ge=0)
    """Tokens of earlier requests' answers that are kept to look into. Kept apart for each
    ``cache_salt``; requests without one share on a server only with ``share_unsalted``. 0 keeps
    none."""

    recycled_contexts: int = Field(default=65_536, ge=0, le=1 << 24)
    """Contexts, of one or two tokens, whose likeliest next tokens are kept where the target
    verified them; 80 bytes each. Shared as answers are. 0 keeps none."""

    corpus: str | None = None
    """Folder or file made by ``vllm-spec corpus build``: which tokens followed which others in text
    like that to come, such as the target's answers. All requests draft from it."""

    drafter: Drafter | None = None
    """A method that drafts with a checkpoint, with its options: ``{"method": "blockwise", "model":
    FOLDER}``; or any other but those that look up what `auto` has anyway. Its ``draw`` stays
    false. It is asked where the other sources are not sure enough to do without."""

    max_ngram: int = Field(default=24, ge=1, le=64)
    """Longest end of the text, in tokens, that is looked up."""

    max_cache_salts: int = Field(default=16, ge=1, le=4096)
    """Number of ``cache_salt`` values that are remembered at a time; the one unused for longest is
    forgotten first. Requests without a salt do not count."""

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        some = self.copy_input or self.own_text or self.earlier_answers or self.recycled_contexts
        if not some and self.corpus is None and self.drafter is None:
            raise ValueError(
                "found every source switched off; leave one of copy_input, own_text, "
                "earlier_answers, recycled_contexts on, or name a corpus or a drafter"
            )
        return self
