# SPDX-License-Identifier: Apache-2.0
"""What views take of memory beside the KV cache, as it is allocated on one rank.

By arithmetic: a block's mean is one key a layer and head where the block has two vectors a token,
so means take 1 / (2 * block size) of the KV of the layers that choose pages. A choice of pages is a
number a page, layer and request that may run.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_spec_ext.engine.views.paged_target import PagedTarget


@dataclass(frozen=True)
class ViewMemory:
    """Bytes."""

    kv: int  # of the target, all blocks
    means: int  # of all blocks
    choices: int  # of all views, for as many requests as may run
    num_tokens: int  # that all blocks have room for

    @classmethod
    def of(cls, paged: "PagedTarget") -> "ViewMemory":
        """Look at what is there.

        Args:
            paged: Bound to its caches.
        """
        return cls(
            kv=sum(cache.nbytes for cache in paged.caches),
            means=sum(means.nbytes for means in paged.means),
            choices=sum(choices.nbytes for choices in paged.choices),
            num_tokens=paged.caches[0].shape[0] * paged.block_size,
        )

    @property
    def kv_of_token(self) -> float:
        """Of a token of context."""
        return self.kv / self.num_tokens

    @property
    def means_of_token(self) -> float:
        """Of a token of context."""
        return self.means / self.num_tokens

    def __str__(self) -> str:
        return (
            f"KV {self.kv_of_token:.0f} bytes a token, page means {self.means_of_token:.1f} "
            f"({self.means / self.kv:.2%} of it); choices of pages {self.choices} bytes in all"
        )
