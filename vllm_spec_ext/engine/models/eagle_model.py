# SPDX-License-Identifier: Apache-2.0
"""One EAGLE-3 head with its books: a draft model that reads the target's hidden states; no vLLM.

The head reads a token together with a hidden state for the position before it: the target's for
certain tokens, its own output for drafted ones. So the KV of position i is made of token i + 1 and
of state i, and a request of n tokens, of which the target has read n - 1, has n - 1 positions
(vLLM 0.32 ``SpecDecodeBaseProposer.set_inputs_first_pass``). Everything here counts positions.

The target's states exist in their step only, so the head reads all rows of all requests in every
step, drafts or not. A request that lacks some KV gets no drafts. Drafted tokens are read again once
they are accepted, with the target's states.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vllm_spec_ext.engine.models.branches import LogitRow, PagedBranch
from vllm_spec_ext.engine.models.forward_pass import ForwardPass, Part
from vllm_spec_ext.engine.models.hosted_model import BatchRow, HostedModel
from vllm_spec_ext.proposers.models import Branch
from vllm_spec_ext.proposers.records import RequestStep

if TYPE_CHECKING:
    import torch


class EagleModel(HostedModel):
    """A :class:`.hosted_model.HostedModel` that reads tokens shifted by one, with states.

    The length of its branches counts the tokens read, and the first one of a request never is.
    """

    _num_outputs = 0
    _loses_what_failed = True

    # -- the engine's side ------------------------------------------------------------------------

    def begin_step(self, rows: Sequence[BatchRow]) -> None:
        """See :meth:`.hosted_model.HostedModel.begin_step`; the rows have states."""
        shifted = []
        for row in rows:
            assert row.following is not None
            shifted.append(replace(row, tokens=row.following))
        # A request that found blocks in the prefix cache comes behind one that fills these in the
        # same step: that one has computed less.
        super().begin_step(sorted(shifted, key=lambda row: row.computed))
        self._is_read = False
        self._num_outputs = 0

    def end_step(self, could_draft: bool) -> None:
        """Drafting is over: read what is left, prompts or not."""
        try:
            if not self._is_read:
                self._read_step({})
        finally:
            super().end_step(could_draft)

    def reload(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Run with other weights from now on; KV of the old ones stays, as it cannot be remade."""
        self._runner.reload(weights)

    # -- the proposer's side ----------------------------------------------------------------------

    def sync(
        self,
        requests: Sequence[RequestStep],
        rows: Sequence[int],
        suffixes: Sequence[Sequence[int]] | None = None,
    ) -> list[Branch | None]:
        """See :meth:`vllm_spec_ext.proposers.models.DraftModel.sync`.

        Suffixes take a pass for each of their tokens, as :meth:`extend` does.
        """
        self._was_synced = True
        indices = {requests[index].request_id: index for index in rows}
        found = self._read_step(indices)
        trunks = [found.get(requests[index].request_id) for index in rows]
        if suffixes is not None:
            pairs = [
                (trunk, suffix)
                for trunk, suffix in zip(trunks, suffixes, strict=True)
                if trunk is not None and len(suffix)
            ]
            if pairs:
                self.extend([trunk for trunk, _ in pairs], [suffix for _, suffix in pairs])
        return [trunk if trunk is not None and trunk.alive else None for trunk in trunks]

    def extend(self, branches: Sequence[Branch], tokens: Sequence[Sequence[int]]) -> None:
        """See :meth:`vllm_spec_ext.proposers.models.DraftModel.extend`.

        Each token is read with the output for the one before it, so the longest list says how many
        passes it takes.
        """
        live = []
        for branch, more in zip(branches, tokens, strict=True):
            assert isinstance(branch, PagedBranch)
            if branch.alive:
                live.append((branch, list(more), branch.last, branch.length))
        logits: list[list[LogitRow]] = [[] for _ in live]
        super().extend([one[0] for one in live], [one[1][:1] for one in live])
        for number in range(max((len(one[1]) for one in live), default=0)):
            if number:
                going = [one for one in live if number < len(one[1])]
                super().extend([one[0] for one in going], [[one[1][number]] for one in going])
            for place, (branch, more, _, _) in enumerate(live):
                if branch.alive and number < len(more):
                    assert branch.last is not None
                    logits[place].append(branch.last)
        for (branch, more, before, start), rows in zip(live, logits, strict=True):
            if branch.alive and len(more) > 1:
                branch.before, branch.start = before, start
                branch.rows = (self._stack(rows), 0)
                branch.last = (branch.rows[0], len(rows) - 1)

    # -- inside -----------------------------------------------------------------------------------

    def _read_step(self, indices: dict[str, int]) -> dict[str, PagedBranch]:
        """Read all of the step that was not read, in one pass.

        Args:
            indices: Requests that want logits, and their place in the step's context.

        Returns:
            Their trunks, as far as their KV is complete.
        """
        parts: list[Part] = []
        trunks: dict[str, PagedBranch] = {}
        num_prompt_rows = 0
        for row in self._rows.values():
            index = indices.get(row.request_id) if row.has_ids else None
            part = self._row_part(row, index)
            if part is None:
                continue
            parts.append(part)
            if index is not None:
                trunks[row.request_id] = part.branch
            num_prompt_rows += len(part.tokens) if row.is_prefill else 0
        self._unread, self._is_read = [], True
        for part, first in zip(parts, self._read(parts, num_prompt_rows), strict=True):
            if part.num_wanted:
                trunk = part.branch
                old = self._trunks.pop(trunk.request_id, None)
                if old is not None:  # two trunks would write to the same places
                    old.alive = False
                self._trunks[trunk.request_id] = trunk
                trunk.before = trunk.last = first
                trunk.start = trunk.length
        return trunks

    def _row_part(self, row: BatchRow, index: int | None) -> Part | None:
        """What to read of a request; marks it as filled. None: nothing, or it has a gap."""
        assert row.state_rows is not None
        end = min(len(row.tokens), row.computed + len(row.state_rows), self.max_model_len)
        if row.num_ids is not None:
            # What stands in front of a picture may be in other prompts, too. The states of a
            # position are read with the token behind it.
            end = min(end, row.num_ids - 1)
        start = self._recognise(row)
        if index is not None and end == len(row.tokens):
            start = min(start, end - 1)  # one at least, for its logits
        else:
            index = None
        if start >= end or start < row.computed:
            return None
        self._fill(row, start, end)
        branch = PagedBranch(
            request=-1 if index is None else index,
            length=end,
            is_trunk=True,
            request_id=row.request_id,
            own=row.blocks,
            num_own=len(row.blocks),
            floor=end,
        )
        states = row.state_rows[start - row.computed : end - row.computed]
        wanted = 0 if index is None else 1
        return Part(branch, start, row.tokens[start:end], wanted, states)

    def _note_tail(self, trunk: PagedBranch, start: int, tokens: Sequence[int]) -> None:
        """Drafted tokens were read with the head's own outputs, so they are read again."""

    def _read(self, parts: Sequence[Part], num_prompt_rows: int = 0) -> list[LogitRow]:
        found = super()._read(parts, num_prompt_rows)
        for part in parts:
            if part.num_wanted:  # never more than one, see extend()
                part.branch.outputs.append(self._num_outputs)
                self._num_outputs += 1
        return found

    def _plan(self, parts: Sequence[Part]) -> ForwardPass:
        states = [
            np.array([~part.branch.outputs[-1]], np.int64) if part.states is None else part.states
            for part in parts
        ]
        return replace(super()._plan(parts), states=np.concatenate(states))

    @staticmethod
    def _stack(rows: Sequence[LogitRow]) -> "torch.Tensor":
        import torch

        return torch.stack([tensor[row] for tensor, row in rows])
