# SPDX-License-Identifier: Apache-2.0
"""Building a store from a corpus: tokenise, count, keep the best successors, write."""

import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import tokenizer_fingerprint, tokenizer_vocab_size
from vllm_spec_ext.proposers.corpus.counting import Counter, Counts, Keys
from vllm_spec_ext.proposers.corpus.store import (
    ALIGN,
    FILE_NAME,
    HEADER_BYTES,
    MAX_SUCCESSORS,
    MAX_VOCAB,
    SECTIONS,
    Header,
    NgramStore,
    encode_header,
    quantise,
)

Piece = tuple[Sequence[NDArray[np.uint64]], int]
"""Some documents, as token ids inside the vocabulary, and the bytes that were read for them."""

BATCH_CHARS = 1 << 20
_WORK = ".build-"
_OLD_S = 86400.0  # a build writes something at least every few minutes


@dataclass(frozen=True)
class BuildSettings:
    """What to keep."""

    top_k: int = 12  # successors of a context
    min_count_bigram: int = 2  # rarer two-token contexts are dropped
    min_count_trigram: int = 1
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        """Check the bounds."""
        if not 1 <= self.top_k <= MAX_SUCCESSORS:
            raise SpecExtError(f"top_k={self.top_k}; expected 1 to {MAX_SUCCESSORS}")
        if min(self.min_count_bigram, self.min_count_trigram) < 1:
            raise SpecExtError("minimum counts start at 1, which keeps everything")
        if self.memory_bytes < 1 << 20:
            raise SpecExtError(f"memory={self.memory_bytes} bytes; expected at least 1 MiB")


def encode(tokenizer: object, texts: Sequence[str]) -> list[NDArray[np.uint64]]:
    """Token ids of texts without special tokens, by the fast tokenizer's threads if it has any."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "encode_batch_fast"):
        # As tokenizer.json says, if it says anything: texts would be cut, and padding counted.
        backend.no_truncation()
        backend.no_padding()
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint64) for encoding in encodings]
    encode_one = tokenizer.encode  # type: ignore[attr-defined]
    return [np.array(encode_one(text, add_special_tokens=False), np.uint64) for text in texts]


def batches(documents: Iterable[tuple[str, int]]) -> Iterator[tuple[list[str], int]]:
    """Group documents to about a million characters; with the bytes read for each group."""
    texts: list[str] = []
    chars = read = 0
    for text, num_bytes in documents:
        texts.append(text)
        chars += len(text)
        read += num_bytes
        if chars >= BATCH_CHARS:
            yield texts, read
            texts, chars, read = [], 0, 0
    if texts:
        yield texts, read


def tokenised(documents: Iterable[tuple[str, int]], tokenizer: object) -> Iterator[Piece]:
    """Documents of text as :func:`build_store` takes them.

    Args:
        documents: Texts, each with the bytes read for it.
        tokenizer: A Hugging Face tokenizer; a fast one uses its threads.
    """
    for texts, read in batches(documents):
        yield encode(tokenizer, texts), read


def select_rows(
    keys: Keys, counts: Counts, vocab_size: int, settings: BuildSettings
) -> tuple[Keys, Counts, Keys, NDArray[np.uint8]]:
    """Keep the best successors of each context.

    Args:
        keys: [n] distinct ascending trigram keys; every context is complete.
        counts: [n].
        vocab_size: The sentinel.
        settings: What to keep.

    Returns:
        Contexts [rows] (w1 << 21 | w2), row lengths [rows], tokens [entries], quantised
        probabilities [entries] relative to the context's full count; ties by token id.
    """
    contexts = keys >> np.uint64(21)
    if not len(keys):
        return contexts, np.zeros(0, np.int64), keys, np.zeros(0, np.uint8)
    starts = np.flatnonzero(np.concatenate(([True], contexts[1:] != contexts[:-1])))
    totals = np.add.reduceat(counts, starts)
    lengths = np.diff(np.append(starts, len(keys)))
    group = np.repeat(np.arange(len(starts)), lengths)
    order = np.lexsort((-counts, group))  # stable: ascending tokens stay so among equal counts
    rank = np.arange(len(keys)) - starts[group]
    keep = rank < settings.top_k
    keep &= totals[group] >= settings.min_count_bigram
    # The unknown successors of a rare trigram stay in the total: their share is the back-off's.
    keep &= counts[order] >= settings.min_count_trigram
    chosen = order[keep]
    row_lengths = np.bincount(group[keep], minlength=len(starts))
    rows = row_lengths > 0
    return (
        contexts[starts][rows],
        row_lengths[rows],
        keys[chosen] & np.uint64((1 << 21) - 1),
        quantise(counts[chosen] / totals[group[keep]]),
    )


class _Writer:
    """Appends to the sections' temporary files."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = folder
        self.narrow = np.dtype("<u2" if vocab_size <= 0xFFFF else "<u4")
        self.rows_of_w1 = np.zeros(vocab_size + 2, np.int64)
        self.lengths = dict.fromkeys(SECTIONS, 0)
        self.dtypes = {
            "top": np.dtype("<u4"),
            "w2": self.narrow,
            "off": np.dtype("<u4"),
            "tok": self.narrow,
            "prob": np.dtype("u1"),
            "uni_tok": self.narrow,
            "uni_prob": np.dtype("u1"),
        }
        self.files = {name: (folder / name).open("wb") for name in SECTIONS}
        self.append("off", np.zeros(1, np.int64))

    def append(self, name: str, values: NDArray[np.generic]) -> None:
        """Append to a section in its stored type."""
        self.lengths[name] += len(values)
        values.astype(self.dtypes[name]).tofile(self.files[name])

    def rows(self, part: tuple[Keys, Counts, Keys, NDArray[np.uint8]]) -> None:
        """Append rows as :func:`select_rows` returns them."""
        contexts, row_lengths, tokens, probs = part
        first = (contexts >> np.uint64(21)).astype(np.int64)
        self.rows_of_w1[1:] += np.bincount(first, minlength=len(self.rows_of_w1) - 1)
        ends = self.lengths["tok"] + np.cumsum(row_lengths)
        if len(ends) and ends[-1] > 0xFFFFFFFF:
            raise SpecExtError("over 2^32 entries; raise min_count_bigram or min_count_trigram")
        self.append("w2", contexts & np.uint64((1 << 21) - 1))
        self.append("off", ends)
        self.append("tok", tokens)
        self.append("prob", probs)


def complete_contexts(blocks: Iterable[tuple[Keys, Counts]]) -> Iterator[tuple[Keys, Counts]]:
    """Shift the block boundaries so that no context is split."""
    keys, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for new_keys, new_counts in blocks:
        keys = np.concatenate((keys, new_keys))
        counts = np.concatenate((counts, new_counts))
        if not len(keys):
            continue
        last = int(np.searchsorted(keys, (keys[-1] >> np.uint64(21)) << np.uint64(21)))
        if last:
            yield keys[:last], counts[:last]
            keys, counts = keys[last:], counts[last:]
    if len(keys):
        yield keys, counts


def build_store(
    pieces: Iterable[Piece],
    tokenizer: object,
    out: Path,
    settings: BuildSettings | None = None,
    *,
    tokenizer_name: str = "",
    on_progress: Callable[[int], None] | None = None,
) -> NgramStore:
    """Build a store and write it atomically.

    Args:
        pieces: Documents; no trigram spans two of them.
        tokenizer: A Hugging Face tokenizer, whose ids they are.
        out: Folder, made if needed; an older store in it is replaced.
        settings: What to keep; the defaults if left out.
        tokenizer_name: For messages.
        on_progress: Called with the bytes read since the last call.

    Raises:
        SpecExtError: An empty corpus, or a vocabulary that does not fit.
    """
    settings = settings or BuildSettings()
    vocab_size = tokenizer_vocab_size(tokenizer)
    if vocab_size > MAX_VOCAB:
        raise SpecExtError(f"vocabulary of {vocab_size}; expected at most {MAX_VOCAB}")
    if out.exists() and not out.is_dir():
        raise SpecExtError(f"{out} is a file; --out must name a folder")
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(f"{_WORK}*"):  # of builds that were killed
        if time.time() - left.stat().st_mtime > _OLD_S:
            shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(dir=out, prefix=_WORK))
    try:
        counter = Counter(vocab_size, work, settings.memory_bytes)
        num_documents = 0
        for texts, read in pieces:
            for tokens in texts:
                counter.add(tokens)
            num_documents += len(texts)
            if on_progress is not None:
                on_progress(read)
        if counter.num_tokens == 0:
            raise SpecExtError("the corpus is empty: found no token in any input")
        writer = _Writer(work, vocab_size)
        for keys, counts in complete_contexts(counter.merged()):
            writer.rows(select_rows(keys, counts, vocab_size, settings))
        writer.append("top", np.cumsum(writer.rows_of_w1))
        best = np.argsort(-counter.unigrams, kind="stable")[: settings.top_k]
        best = best[counter.unigrams[best] > 0]
        writer.append("uni_tok", best)
        writer.append("uni_prob", quantise(counter.unigrams[best] / counter.num_tokens))
        final = out / FILE_NAME
        _assemble(
            writer, work / FILE_NAME, tokenizer, tokenizer_name, counter, num_documents, settings
        )
        os.replace(work / FILE_NAME, final)
        _sync_folder(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return NgramStore(final)


def _assemble(
    writer: _Writer,
    path: Path,
    tokenizer: object,
    tokenizer_name: str,
    counter: Counter,
    num_documents: int,
    settings: BuildSettings,
) -> None:
    """Join the sections behind a header and flush everything to disk."""
    for section_file in writer.files.values():
        section_file.close()
    sections: dict[str, tuple[int, str, int]] = {}
    crc = 0
    with path.open("wb") as file:
        file.write(b"\0" * HEADER_BYTES)
        for name in SECTIONS:
            sections[name] = (file.tell(), writer.dtypes[name].str, writer.lengths[name])
            with (writer.folder / name).open("rb") as source:
                crc = _copy(source, file, crc)
            padding = b"\0" * (-file.tell() % ALIGN)
            crc = zlib.crc32(padding, crc)
            file.write(padding)
        header = Header(
            tokenizer=tokenizer_name[:512],
            fingerprint=tokenizer_fingerprint(tokenizer),
            vocab_size=counter.vocab_size,
            order=3,
            top_k=settings.top_k,
            min_count_bigram=settings.min_count_bigram,
            min_count_trigram=settings.min_count_trigram,
            num_tokens=counter.num_tokens,
            num_documents=num_documents,
            num_rows=writer.lengths["w2"],
            num_entries=writer.lengths["tok"],
            payload_bytes=file.tell() - HEADER_BYTES,
            payload_crc=crc,
            sections=sections,
        )
        file.seek(0)
        file.write(encode_header(header))
        file.flush()
        os.fsync(file.fileno())


def _copy(source: BinaryIO, target: BinaryIO, crc: int) -> int:
    while block := source.read(1 << 22):
        crc = zlib.crc32(block, crc)
        target.write(block)
    return crc


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
