# SPDX-License-Identifier: Apache-2.0
"""Block tables of a view, layer by layer, and the choice of pages that fills them; of one rank.

With tensor parallelism each rank chooses for its own heads: the layers' outputs are summed after
attention, and all ranks show the same number of pages.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.engine.views.page_choice import choose_pages
from vllm_spec_ext.engine.views.page_layout import PageBudget
from vllm_spec_ext.engine.views.page_means import PageMeans
from vllm_spec_ext.engine.views.view_pass import RoundPlan, ViewPass

_MEANS_AT_ONCE = 1 << 13  # page means that a choice copies, to bound its memory


class _Choosing(NamedTuple):
    """Requests that choose pages in a pass, and what is the same in all layers."""

    first_rows: torch.Tensor  # [m] of the pass
    choosing: torch.Tensor  # [m] of its requests
    members: torch.Tensor  # [m] of the round's
    places: torch.Tensor  # [m] where their choices are kept
    tables: torch.Tensor  # [m, width] int32 all their blocks
    pages: torch.Tensor  # [m, candidates] int64 those behind the sink, 0 where there is none
    is_candidate: torch.Tensor  # [m, candidates]


class LayerTables:
    """Of one view."""

    def __init__(
        self,
        budget: PageBudget,
        layers: Sequence[str],
        dense: Sequence[str],
        max_num_seqs: int,
        device: torch.device,
        means: PageMeans | None = None,
    ) -> None:
        """Without a round.

        Args:
            budget: Of the view.
            layers: All attention layers, in the order of the model.
            dense: Those of them that see everything.
            max_num_seqs: Most requests in a step.
            device: Of the tables.
            means: Of the layers that choose; None if none does.
        """
        self._budget = budget
        self._dense = frozenset(dense)
        self._device = device
        self._means = means
        self._number: dict[str, int] = {}  # of the layers that choose
        if means is not None:
            chooses = [name for name in layers if name not in self._dense]
            self._number = {name: i for i, name in enumerate(chooses)}
        shape = (len(self._number), max_num_seqs, budget.num_chosen)
        self.choices = torch.zeros(shape, dtype=torch.int64, device=device)
        """What each request chose last in each layer, as pages of its own table."""
        self._choosing: list[_Choosing] = []

    def begin(self, plan: RoundPlan) -> None:
        """A round begins: means of pages that are new, tables by what was chosen before."""
        self._partial = self._at(plan.partial)
        self._recent_starts = self._at(plan.recent_starts)
        self._places = self._at(plan.places)
        self._tables = torch.from_numpy(plan.tables).to(self._device)
        self._view_tables = torch.from_numpy(plan.view_tables).to(self._device)
        self._is_partial = len(plan.partial) > 0
        if not self._is_partial or self._means is None:
            return
        self._means.update(plan.new_pages)
        first, count = self._budget.num_sink, self._budget.num_chosen
        blocks = self._tables[self._partial][None].expand(len(self._number), -1, -1)
        # A request without a choice finds some pages here, and its own in the pass that chooses.
        choices = self.choices[:, self._places].clamp(max=blocks.shape[2] - 1)
        chosen = blocks.gather(2, choices)
        self._by_layer = self._view_tables[None].repeat(len(self._number), 1, 1)
        self._by_layer[:, self._partial, first : first + count] = chosen
        self._place_of = np.full(len(plan.tables), -1, np.int64)
        self._place_of[plan.partial] = np.arange(len(plan.partial))

    def begin_pass(self, plan: ViewPass) -> None:
        """Who chooses pages in the pass to come."""
        self._members = self._at(plan.members)
        first_rows = np.cumsum(plan.query_lens) - plan.query_lens
        self._choosing = []
        if not len(plan.choosing):
            return
        first_rows, choosing = self._at(first_rows[plan.choosing]), self._at(plan.choosing)
        chooser = self._at(self._place_of[plan.members[plan.choosing]])
        num_at_once = max(1, _MEANS_AT_ONCE // self._tables.shape[1])
        for start in range(0, len(plan.choosing), num_at_once):
            part = slice(start, start + num_at_once)
            self._choosing.append(
                self._choosing_part(first_rows[part], choosing[part], chooser[part])
            )

    def _choosing_part(
        self, first_rows: torch.Tensor, choosing: torch.Tensor, chooser: torch.Tensor
    ) -> "_Choosing":
        members, first = self._members[choosing], self._budget.num_sink
        tables = self._tables[members]
        columns = torch.arange(first, tables.shape[1], device=self._device)
        is_candidate = columns < self._recent_starts[chooser][:, None]
        pages = tables[:, first:].long() * is_candidate
        places = self._places[chooser]
        return _Choosing(first_rows, choosing, members, places, tables, pages, is_candidate)

    def end_pass(self) -> None:
        """Nobody chooses outside of a pass."""
        self._choosing = []

    @property
    def differ(self) -> bool:
        """Whether layers of this round see different pages."""
        return self._is_partial and (self._means is not None or bool(self._dense))

    def shared(self) -> torch.Tensor:
        """[k, view_width] int32 for all layers that neither choose nor see everything."""
        return self._view_tables[self._members]

    def full(self) -> torch.Tensor:
        """[k, width] int32 for layers that see everything."""
        return self._tables[self._members]

    def of(self, layer: str) -> torch.Tensor | None:
        """[k, view_width] int32, a copy, for a layer that chooses; None = it does not."""
        if layer not in self._number or not self._is_partial:
            return None
        return self._by_layer[self._number[layer]][self._members]

    def is_dense(self, layer: str) -> bool:
        """Whether a layer sees everything."""
        return layer in self._dense

    def choose(self, layer: str, queries: torch.Tensor, table: torch.Tensor) -> None:
        """Choose pages by the queries of a layer, before it attends.

        Args:
            layer: Its name.
            queries: [num_rows, num_heads, head_size] of the pass.
            table: [k, view_width] that the layer is about to read; written to.
        """
        if layer not in self._number or self._means is None:
            return
        number, count, first = self._number[layer], self._budget.num_chosen, self._budget.num_sink
        for part in self._choosing:
            of_pages = self._means.of(layer, part.pages)
            queried = queries[part.first_rows]
            chosen = choose_pages(queried, of_pages, part.is_candidate, count) + first
            self.choices[number, part.places] = chosen
            blocks = part.tables.gather(1, chosen)
            self._by_layer[number, part.members, first : first + count] = blocks
            table[part.choosing, first : first + count] = blocks

    def _at(self, array: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device, non_blocking=True)
