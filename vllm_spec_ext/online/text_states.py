# SPDX-License-Identifier: Apache-2.0
"""Hidden states of the target over recorded texts: made when first asked for, the latest kept.

They are not recorded: of every token of a text they are some hundred times as large as all else
that is, and reading the text once more gives them again.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_spec_ext.training.target import Target

_MOST_BYTES = 512 << 20


class TextStates:
    """States behind some layers of one target."""

    def __init__(
        self, target: Target, layers: Sequence[int], most_bytes: int = _MOST_BYTES
    ) -> None:
        """Nothing is read yet.

        Args:
            target: Frozen.
            layers: As :meth:`~..training.target.Target.hidden` counts them.
            most_bytes: Of what is kept, where the target is.
        """
        self._target, self._layers = target, tuple(layers)
        self._most_bytes = most_bytes
        self._kept: OrderedDict[int, Tensor] = OrderedDict()  # the latest last
        self._num_bytes = 0
        self.num_read = 0
        """Texts that were read, again or for the first time."""

    def of(self, number: int, token_ids: Tensor) -> Tensor:
        """[n, width] of a text [n], in the target's type.

        Args:
            number: By which the text is known.
            token_ids: The text; not looked at if its states are kept.
        """
        found = self._kept.pop(number, None)
        if found is None:
            found = self._read(token_ids)
            self._num_bytes += found.nbytes
        self._kept[number] = found
        while self._num_bytes > self._most_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.nbytes
        return found

    @torch.no_grad()
    def _read(self, token_ids: Tensor) -> Tensor:
        # One text at a time: all layers' states of a padded batch would take much memory.
        self.num_read += 1
        ids = token_ids.to(self._target.device, torch.int64).unsqueeze(0)
        return self._target.hidden(ids, torch.ones_like(ids), self._layers)[0]
