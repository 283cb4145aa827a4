# SPDX-License-Identifier: Apache-2.0
"""The device's side of late drafts, without an engine: texts of a batch in places of their own."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_spec_ext.proposers.base import DeviceTexts, LateDrafter, RequestStep

PLACES = (3, 1, 2)
LONGEST = 400  # tokens


class LateDevice:
    """Of one late drafter."""

    def __init__(self, late: LateDrafter) -> None:
        self.late = late
        late.start(torch.device("cpu"))
        self.tokens = torch.zeros(1 + max(PLACES), LONGEST, dtype=torch.int32)
        self.lengths = torch.zeros(1 + max(PLACES), dtype=torch.int32)

    def draft(
        self, known: Sequence[RequestStep], texts: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Drafts of requests as they are known, behind the texts that the device has."""
        places = np.array(PLACES[: len(known)], np.intp)
        for place, text in zip(places.tolist(), texts, strict=True):
            self.tokens[place, : len(text)] = torch.tensor(text)
            self.lengths[place] = len(text)
        on_device = torch.from_numpy(places).long()
        states = torch.zeros(len(known), 4)
        found = DeviceTexts(
            self.tokens, self.lengths, on_device, places, torch.tensor, lambda: states
        )
        drafts: list[list[int]] = self.late.draft(known, found).tolist()
        return drafts
