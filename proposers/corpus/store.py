# SPDX-License-Identifier: Apache-2.0
"""The base store: trigram counts of a corpus, read-only and memory-mapped.

After ADED's trigram matrix: the most frequent successors of each pair of tokens. One file: a header
of 4096 bytes (magic, version, byte order, header CRC, JSON), then the sections of
:data:`SECTIONS`, in that order, each aligned to 64 bytes.
Rows are sorted by (w1, w2): ``top[w1]:top[w1 + 1]`` is the range of rows of w1, ``w2`` is sorted
inside it, ``off`` delimits a row's successors, most probable first. Rows of the one-token context
(the back-off) stand under the sentinel ``w1 = vocab_size``. All processes of a machine share the
file through the page cache. Nothing here writes it: see ``build.py``.
"""

import json
import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import check_fingerprint, tokenizer_fingerprint
from vllm_spec_ext.proposers.base import EngineHandle, TargetFacts

MAGIC = b"VSXNGRAM"
VERSION = 1
HEADER_BYTES = 4096
ALIGN = 64
FILE_NAME = "trigrams.vsx"
BYTE_ORDER_MARK = 0x01020304
PREFIX = struct.Struct("<8sIIII")  # magic, version, byte order, CRC of the JSON, its length
SECTIONS = ("top", "w2", "off", "tok", "prob", "uni_tok", "uni_prob")
MAX_SUCCESSORS = 16  # of a row
MAX_VOCAB = (1 << 21) - 2  # three token ids and a sentinel are packed into 21 bits each
PROB_STEPS = 16.0  # an 8-bit probability q stands for 2 ** (-q / 16): 2 % relative error at most
PROB_TABLE = np.exp2(-np.arange(256, dtype=np.float32) / PROB_STEPS).astype(np.float32)


class BaseArrays(NamedTuple):
    """The sections as the search kernel takes them."""

    top: NDArray[np.uint32]  # [vocab_size + 2]
    w2: NDArray[np.uint32]  # [num_rows] uint16 or uint32
    off: NDArray[np.uint32]  # [num_rows + 1] uint32 or uint64
    tok: NDArray[np.uint32]  # [num_entries] uint16 or uint32
    prob: NDArray[np.uint8]  # [num_entries] index into PROB_TABLE
    uni_tok: NDArray[np.uint32]  # [<= top_k] like tok
    uni_prob: NDArray[np.uint8]  # [<= top_k]


@dataclass(frozen=True)
class Header:
    """What a store says about itself."""

    tokenizer: str
    fingerprint: str
    vocab_size: int
    order: int
    top_k: int
    min_count_bigram: int
    min_count_trigram: int
    num_tokens: int
    num_documents: int
    num_rows: int
    num_entries: int
    payload_bytes: int
    payload_crc: int
    sections: dict[str, tuple[int, str, int]]  # name -> (offset in the file, dtype, length)


def quantise(probs: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Probabilities [n] in (0, 1] to 8-bit log codes [n]."""
    codes = np.rint(-PROB_STEPS * np.log2(np.maximum(probs, 2.0**-20)))
    return np.clip(codes, 0, 255).astype(np.uint8)


def encode_header(header: Header) -> bytes:
    """The first 4096 bytes of a store."""
    text = json.dumps(asdict(header), sort_keys=True).encode()
    prefix = PREFIX.pack(MAGIC, VERSION, BYTE_ORDER_MARK, zlib.crc32(text), len(text))
    if len(prefix) + len(text) > HEADER_BYTES:
        raise SpecExtError("the store's header is too long; shorten the tokenizer's name")
    return (prefix + text).ljust(HEADER_BYTES, b"\0")


def store_path(path: str | Path) -> Path:
    """The store's file, given it or its folder.

    Raises:
        SpecExtError: There is none.
    """
    path = Path(path).expanduser()
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise SpecExtError(
            f"no n-gram store at {path}: expected a folder with {FILE_NAME} or the file itself; "
            "make one with `vllm-spec corpus build --tokenizer MODEL --input FILES --out DIR`"
        )
    return file


def read_header(path: Path) -> Header:
    """Read and check the header of a store.

    Raises:
        SpecExtError: Not a store, another version or byte order, damaged, or cut short.
    """

    def refuse(found: str, expected: str) -> SpecExtError:
        return SpecExtError(
            f"cannot use n-gram store {path}: found {found}, expected {expected}; build it again "
            "with `vllm-spec corpus build`"
        )

    with path.open("rb") as file:
        block = file.read(HEADER_BYTES)
    if len(block) < HEADER_BYTES or block[:8] != MAGIC:
        raise refuse(f"a file of {path.stat().st_size} bytes starting {block[:8]!r}", repr(MAGIC))
    _, version, mark, crc, length = PREFIX.unpack_from(block)
    if mark != BYTE_ORDER_MARK:
        raise refuse("another byte order", "little endian")
    if version != VERSION:
        raise refuse(f"format version {version}", f"version {VERSION}")
    text = block[PREFIX.size : PREFIX.size + length]
    if length > HEADER_BYTES - PREFIX.size or zlib.crc32(text) != crc:
        raise refuse("a damaged header (wrong CRC)", "an intact one")
    fields = json.loads(text)
    fields["sections"] = {name: tuple(value) for name, value in fields["sections"].items()}
    header = Header(**fields)
    size, wanted = path.stat().st_size, HEADER_BYTES + header.payload_bytes
    if size != wanted:
        raise refuse(f"{size} bytes", f"{wanted} (the file was cut short or appended to)")
    return header


class NgramStore:
    """An open store. Opening reads the header and the index of w1, not the rows."""

    def __init__(self, path: str | Path) -> None:
        """Map the file and check its structure (milliseconds).

        Args:
            path: The store's folder or file.

        Raises:
            SpecExtError: No store there, or one that this version cannot use.
        """
        self.path = store_path(path)
        self.header = read_header(self.path)
        raw = np.memmap(self.path, dtype=np.uint8, mode="r")
        parts: dict[str, NDArray[np.uint32]] = {}
        for name in SECTIONS:
            start, dtype, length = self.header.sections[name]
            stop = start + length * np.dtype(dtype).itemsize
            if start < HEADER_BYTES or stop > raw.size:
                raise self._damaged(f"section {name} ends at byte {stop} of {raw.size}")
            # np.asarray: a plain array, as numba knows no memmap; the mapping stays alive by base.
            parts[name] = np.asarray(raw[start:stop]).view(dtype)
        self.arrays = BaseArrays(**parts)  # type: ignore[arg-type]
        self._check()

    def _damaged(self, what: str) -> SpecExtError:
        return SpecExtError(
            f"n-gram store {self.path} is damaged: {what}; build it again with "
            "`vllm-spec corpus build`"
        )

    def _check(self) -> None:
        """Cheap structural checks; the kernel also clamps every range that it reads."""
        header, arrays = self.header, self.arrays
        rows, entries = header.num_rows, header.num_entries
        if header.order != 3 or not 1 <= header.vocab_size <= MAX_VOCAB:
            raise self._damaged(f"order {header.order}, vocabulary {header.vocab_size}")
        if len(arrays.top) != header.vocab_size + 2 or len(arrays.w2) != rows:
            raise self._damaged("the index does not fit the vocabulary or the rows")
        if len(arrays.off) != rows + 1 or not len(arrays.tok) == len(arrays.prob) == entries:
            raise self._damaged("the numbers of rows and entries do not agree")
        if len(arrays.uni_tok) != len(arrays.uni_prob):
            raise self._damaged("the numbers of single tokens do not agree")
        if (
            arrays.top[0] != 0
            or arrays.top[-1] != rows
            or (np.diff(arrays.top.view("i4")) < 0).any()
        ):
            raise self._damaged("its index is not monotone")
        if arrays.off[0] != 0 or arrays.off[-1] != entries:
            raise self._damaged("its rows do not span the entries")

    def verify(self) -> None:
        """Read the whole file: payload CRC, monotone rows, tokens inside the vocabulary.

        Raises:
            SpecExtError: Something is wrong.
        """
        crc = 0
        with self.path.open("rb") as file:
            file.seek(HEADER_BYTES)
            while block := file.read(1 << 22):
                crc = zlib.crc32(block, crc)
        if crc != self.header.payload_crc:
            raise self._damaged(
                f"found payload CRC {crc:08x}, expected {self.header.payload_crc:08x}"
            )
        arrays = self.arrays
        if (np.diff(arrays.off.astype(np.int64)) < 0).any():
            raise self._damaged("its rows are not monotone")
        if len(arrays.tok) and int(arrays.tok.max()) >= self.header.vocab_size:
            raise self._damaged("it holds tokens outside the vocabulary")

    def row(self, w1: int, w2: int) -> list[tuple[int, float]]:
        """Successors of a context with their probabilities; for inspection, not for speed.

        Args:
            w1: First token; ``vocab_size`` asks for the one-token context w2.
            w2: Second token.
        """
        arrays = self.arrays
        low, high = int(arrays.top[w1]), int(arrays.top[w1 + 1])
        place = low + int(np.searchsorted(arrays.w2[low:high], w2))
        if place >= high or arrays.w2[place] != w2:
            return []
        span = slice(int(arrays.off[place]), int(arrays.off[place + 1]))
        return [
            (int(token), float(PROB_TABLE[code]))
            for token, code in zip(arrays.tok[span], arrays.prob[span], strict=True)
        ]


def empty_arrays(vocab_size: int) -> BaseArrays:
    """Arrays of a store without rows, read-only and typed like a mapped store's."""
    narrow = np.dtype(np.uint16 if vocab_size <= 0xFFFF else np.uint32)
    dtypes = ("u4", narrow, "u4", narrow, "u1", narrow, "u1")
    lengths = (vocab_size + 2, 0, 1, 0, 0, 0, 0)
    parts = [np.zeros(n, dtype) for n, dtype in zip(lengths, dtypes, strict=True)]
    for part in parts:
        part.flags.writeable = False
    return BaseArrays(*parts)


def target_fingerprint(target: TargetFacts | EngineHandle) -> str:
    """Fingerprint of the target's tokenizer; raises SpecExtError if the engine has none."""
    tokenizer = target.load_tokenizer()
    if tokenizer is None:
        raise SpecExtError(
            "found no tokenizer (skip_tokenizer_init), expected the one that the corpus or "
            "overlay_file was made with, to check that they fit; load the tokenizer, or leave out "
            "corpus and overlay_file"
        )
    return tokenizer_fingerprint(tokenizer)


def open_store(path: str, target: TargetFacts | EngineHandle) -> NgramStore:
    """A store for a target.

    Raises:
        SpecExtError: There is none, it is damaged, or of another tokenizer or larger vocabulary.
    """
    store = NgramStore(path)
    header = store.header
    check_fingerprint(
        header.fingerprint,
        target_fingerprint(target),
        f"n-gram store {store.path} (tokenizer {header.tokenizer})",
        f"Build one with `vllm-spec corpus build --tokenizer {target.model}`.",
    )
    if header.vocab_size > target.vocab_size:
        raise SpecExtError(
            f"n-gram store {store.path}: found a vocabulary of {header.vocab_size}, expected "
            f"at most the model's {target.vocab_size}; build it with the model's own tokenizer"
        )
    return store
