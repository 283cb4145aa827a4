# SPDX-License-Identifier: Apache-2.0
"""`vllm-spec corpus`: build and inspect n-gram stores for `adaptive_ngram`."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_spec_ext.errors import SpecExtError

corpus_app = typer.Typer(
    help="Build and inspect n-gram stores for adaptive_ngram.",
    no_args_is_help=True,
    add_completion=False,
)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``512M`` or ``2GiB`` (powers of 1024).

    Raises:
        SpecExtError: Not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise SpecExtError(f"memory: found {text!r}, expected a size such as 512M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def load_tokenizer(name: str) -> object:
    """A Hugging Face tokenizer by model name or folder.

    Raises:
        SpecExtError: It cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise SpecExtError("tokenising needs transformers, which comes with vLLM") from error
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises many types for a wrong name
        raise SpecExtError(
            f"cannot load the tokenizer of {name!r}: {error}; give a model name or folder"
        ) from error


@corpus_app.command()
def build(
    tokenizer: Annotated[str, typer.Option(help="Model name or folder whose tokenizer to use.")],
    inputs: Annotated[
        list[Path], typer.Option("--input", help="Text, .jsonl or .parquet; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the store.")],
    more_inputs: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILES]...", help="More input files.")
    ] = None,
    field: Annotated[str, typer.Option(help="Field or column of .jsonl and .parquet.")] = "text",
    memory: Annotated[str, typer.Option(help="Bound for counting, e.g. 512M.")] = "1G",
    top_k: Annotated[int, typer.Option(help="Successors kept for a context.")] = 12,
    min_count_bigram: Annotated[
        int, typer.Option(help="Drop two-token contexts seen less often.")
    ] = 2,
    min_count_trigram: Annotated[int, typer.Option(help="Drop successors seen less often.")] = 1,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
) -> None:
    """Count the trigrams of a corpus and write the store that adaptive_ngram reads."""
    from vllm_spec_ext.proposers.corpus.build import BuildSettings, build_store
    from vllm_spec_ext.proposers.corpus.documents import read_documents

    files = [*inputs, *(more_inputs or [])]
    for path in files:
        if not path.is_file():
            found = "found a folder, expected its files" if path.is_dir() else "no such input file"
            raise SpecExtError(f"{found}: {path}{'/*' if path.is_dir() else ''}")
    settings = BuildSettings(top_k, min_count_bigram, min_count_trigram, parse_bytes(memory))
    loaded = load_tokenizer(tokenizer)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet) as progress:
        total = sum(path.stat().st_size for path in files)
        task = progress.add_task("counting n-grams", total=total)

        def advance(num_bytes: int) -> None:
            progress.advance(task, num_bytes)
            if progress.finished:
                progress.update(task, description="merging and writing")

        documents = (item for path in files for item in read_documents(path, field))
        store = build_store(
            documents, loaded, out, settings, tokenizer_name=tokenizer, on_progress=advance
        )
    store.verify()
    header = store.header
    size = store.path.stat().st_size / 1e6
    Console().print(
        f"{store.path}: {size:.1f} MB, {header.num_tokens:,} tokens of "
        f"{header.num_documents:,} documents, {header.num_rows:,} contexts, "
        f"{header.num_entries:,} successors",
        soft_wrap=True,
    )


@corpus_app.command()
def info(
    path: Annotated[Path, typer.Argument(help="Folder or file of a store.")],
    verify: Annotated[bool, typer.Option(help="Read the whole file and check its CRC.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a store holds and, with --verify, whether it is intact."""
    from vllm_spec_ext.proposers.corpus.store import NgramStore

    store = NgramStore(path)
    if verify:
        store.verify()
    header = store.header
    fields: dict[str, str | int] = {
        "path": str(store.path),
        "bytes": store.path.stat().st_size,
        "tokenizer": header.tokenizer,
        "fingerprint": header.fingerprint,
        "vocab_size": header.vocab_size,
        "order": header.order,
        "top_k": header.top_k,
        "min_count_bigram": header.min_count_bigram,
        "min_count_trigram": header.min_count_trigram,
        "num_tokens": header.num_tokens,
        "num_documents": header.num_documents,
        "num_rows": header.num_rows,
        "num_entries": header.num_entries,
        "payload_crc": f"{header.payload_crc:08x}",
        "verified": "yes" if verify else "no (--verify reads the whole file)",
    }
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
        return
    width = max(map(len, fields))
    for name, value in fields.items():
        typer.echo(f"{name:{width}}  {f'{value:,}' if isinstance(value, int) else value}")


@corpus_app.command()
def merge(
    overlays: Annotated[list[Path], typer.Argument(help="Files saved as overlay_file.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
) -> None:
    """Make one overlay of those of several replicas; `merged` for `{replica}` in overlay_file."""
    from vllm_spec_ext.proposers.adaptive_ngram.overlay_files import merge_overlays

    num_contexts = merge_overlays(overlays, out)
    typer.echo(f"{out}: {num_contexts:,} contexts of {len(overlays)} overlays")
