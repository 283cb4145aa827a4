# SPDX-License-Identifier: Apache-2.0
"""`vllm-spec corpus`: build and inspect n-gram stores for `auto` and `adaptive_ngram`."""

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_spec_ext.cli.corpus_inputs import check_input, num_bytes, pieces_of
from vllm_spec_ext.errors import SpecExtError

if TYPE_CHECKING:
    from vllm_spec_ext.proposers.corpus.build import BuildSettings
    from vllm_spec_ext.training.task import DraftTask

corpus_app = typer.Typer(
    help="Build and inspect n-gram stores for auto and adaptive_ngram.",
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
        list[Path],
        typer.Option(
            "--input",
            help="Text, .jsonl or .parquet, or a folder of answers that `corpus answers` or "
            "`train METHOD --stage data` made; may be repeated.",
        ),
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
    """Count the trigrams of a corpus and write the store that auto and adaptive_ngram read."""
    from vllm_spec_ext.proposers.corpus.build import BuildSettings

    files = [*inputs, *(more_inputs or [])]
    for path in files:
        check_input(path)
    settings = BuildSettings(top_k, min_count_bigram, min_count_trigram, parse_bytes(memory))
    _build(tokenizer, files, out, field, settings, quiet)


def _build(
    tokenizer: str, paths: list[Path], out: Path, field: str, settings: "BuildSettings", quiet: bool
) -> None:
    """Count, write and say what came of it."""
    from vllm_spec_ext.proposers.corpus.build import build_store

    loaded = load_tokenizer(tokenizer)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet) as progress:
        total = sum(num_bytes(path) for path in paths)
        task = progress.add_task("counting n-grams", total=total)

        def advance(read: int) -> None:
            progress.advance(task, read)
            if progress.finished:
                progress.update(task, description="merging and writing")

        pieces = (piece for path in paths for piece in pieces_of(path, field, loaded))
        store = build_store(
            pieces, loaded, out, settings, tokenizer_name=tokenizer, on_progress=advance
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
    method = json.dumps({"method": "auto", "corpus": str(out)})
    typer.echo(f"serve with it: vllm serve MODEL --speculative-config {shlex.quote(method)}")


@corpus_app.command()
def answers(
    model: Annotated[str, typer.Option(help="Target: model name or folder.")],
    prompts: Annotated[
        list[Path],
        typer.Option(help="Prompts: .jsonl, .json or text, a line each; may be repeated."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the store.")],
    field: Annotated[
        str, typer.Option(help="Where an object has its prompt: prompt, turns\\[0].")
    ] = "prompt",
    max_prompts: Annotated[
        int | None, typer.Option(help="Use only this many, drawn at random.")
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(help="Leave out longer prompts.")] = 1024,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 = greedy.")] = 0.0,
    generator: Annotated[
        str, typer.Option(help="Who generates: vllm, or transformers where vLLM is not installed.")
    ] = "vllm",
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
) -> None:
    """Let the target answer prompts, and write a store of its answers: what `auto` gains most by.

    Answers are kept beside it, in OUT.run/data, and a run that was stopped goes on there.
    """
    from vllm_spec_ext.options import parse_options
    from vllm_spec_ext.proposers.corpus.build import BuildSettings
    from vllm_spec_ext.training.schema import Training
    from vllm_spec_ext.training.stages import prepare

    given = {
        "model": model,
        "out": out,
        "stage": "data",
        "prompts": prompts,
        "field": field,
        "max_prompts": max_prompts,
        "max_prompt_tokens": max_prompt_tokens,
        "max_length": max_prompt_tokens + 2,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "generator": generator,
    }
    config = parse_options(Training, given, "corpus answers")
    prepare(config, _no_task, typer.echo)
    _build(model, [config.data_folder], out, field, BuildSettings(), quiet)


def _no_task(*_: object) -> "DraftTask":
    raise AssertionError("only the data stage was asked for")


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
