# SPDX-License-Identifier: Apache-2.0
"""Settings of a benchmark: the command line and ``--config`` files fill the same schema."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vllm_spec_ext.bench import methods as method_specs
from vllm_spec_ext.bench import prompts as prompt_files
from vllm_spec_ext.bench.datasets import Dataset, load
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.prompts import BUNDLED, Question
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import Options, parse_options


class BenchSettings(Options):
    """Everything that decides what a benchmark measures."""

    model: str
    """Name or folder of the target model."""

    methods: list[str] | dict[str, dict[str, Any] | None] = Field(
        default=list(method_specs.DEFAULT_METHODS), min_length=1
    )
    """Methods: a list of names (or ``NAME=JSON``), or a mapping from name to settings. Plain
    decoding is added if it is missing, as everything is measured against it."""

    ngram_grid: bool = False
    """Add four settings of vLLM's ``ngram`` (1-3 and 2-4 grams, 5 and 8 tokens)."""

    prompts: str = BUNDLED
    """JSON Lines file with the prompts; ``bundled`` takes those of this package."""

    field: str = "prompt"
    """Key of a line that holds the prompt: a text, a list of texts (turns) or chat messages."""

    template: str | None = None
    """Text around each prompt, with ``{text}`` where it goes; on the command line ``\\n`` is a line
    break."""

    raw: bool = False
    """Send prompts as plain text, without the model's chat template."""

    limit: int | None = Field(default=None, ge=1)
    """Use this many prompts, spread evenly over the file, or over all datasets."""

    datasets: dict[str, Dataset | str] = Field(default_factory=dict)
    """Datasets by name, in place of ``prompts``: a file, or its ``prompts``, ``field``,
    ``template`` and ``limit``. The names spec_bench, humaneval, gsm8k and jfleg know how those
    files are read; copy_rate and needles make their own prompts, long_documents cuts text files."""

    max_tokens: int = Field(default=128, ge=2)
    """Most tokens of an answer."""

    batch_size: list[int] = Field(default=[1], min_length=1)
    """Numbers of requests in flight; each is measured on its own."""

    servers: dict[str, str] = Field(default_factory=dict)
    """Running servers by name, as URLs, to load with ``vllm bench serve`` instead of starting
    engines; the first is the baseline, and ``model`` is the one they serve. First turns only."""

    request_rate: list[float] = Field(default=[0.0], min_length=1)
    """Requests per second sent to servers, at most ``batch_size`` in flight; 0 does not wait."""

    repeats: int = Field(default=3, ge=1)
    """Timed passes over the prompts for each method and batch size."""

    warm_up: int = Field(default=1, ge=0)
    """Prompts answered before timing, by each engine."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. In float32, greedy answers must be identical."""

    temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature; 0 is greedy."""

    seed: int = 0
    """Seed of the engines, and of sampling (prompt i uses seed + i). With running servers it also
    chooses or makes the prompts; without it every run draws another one there, and says which."""

    max_model_len: int = Field(default=2048, ge=16)
    """Longest prompt and answer together, in tokens."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of ``vllm.LLM``, for all methods alike."""

    def questions(self, chance: random.Random | None = None) -> list[Question]:
        """The prompts to answer; raises SpecExtError.

        Args:
            chance: Chooses among more prompts than are wanted; without it, always the same ones.
        """
        if self.datasets:
            questions = load(
                {
                    name: Dataset(prompts=given) if isinstance(given, str) else given
                    for name, given in self.datasets.items()
                },
                chance,
            )
            return prompt_files.spread_evenly(questions, self.limit, chance)
        return prompt_files.load(
            self.prompts, field=self.field, template=self.template, limit=self.limit, chance=chance
        )

    def source(self) -> str:
        """Where the prompts come from, in a few words."""
        return ", ".join(self.datasets) if self.datasets else self.prompts

    def all_methods(self) -> list[Method]:
        """The methods to compare, plain decoding first; raises SpecExtError."""
        if isinstance(self.methods, dict):
            specs = [method_specs.from_settings(*item) for item in self.methods.items()]
            return method_specs.collect([], specs, grid=self.ngram_grid)
        return method_specs.collect(self.methods, grid=self.ngram_grid)

    def llm_args(self) -> dict[str, Any]:
        """Arguments of ``LLM`` for every engine of this benchmark."""
        return {
            "dtype": self.dtype,
            "seed": self.seed,
            "max_model_len": self.max_model_len,
            "max_num_seqs": max(self.batch_size),
            **self.engine_args,
        }


def merge(file: Mapping[str, Any], given: Mapping[str, Any]) -> BenchSettings:
    """Settings of a file, overridden by those given on the command line.

    Raises:
        SpecExtError: An unknown key, a missing model or a value out of range.
    """
    flags = {name: value for name, value in given.items() if value is not None}
    joined = {**file, **flags}
    one_file = ("prompts", "field", "template")
    if "datasets" in flags:
        joined = {name: value for name, value in joined.items() if name not in one_file}
        joined |= {name: flags[name] for name in one_file if name in flags}
    elif any(name in flags for name in one_file):
        joined.pop("datasets", None)
    if "model" not in joined:
        raise SpecExtError("no model given; pass --model NAME or set 'model' in --config")
    settings = parse_options(BenchSettings, joined, "bench")
    if settings.datasets:
        for name in one_file:
            if name in joined:
                raise SpecExtError(
                    f"{name} belongs to the one file that datasets replace; set it in the dataset"
                )
    if any(rate < 0 for rate in settings.request_rate):
        raise SpecExtError(f"request rates {settings.request_rate} hold a negative one")
    for size in settings.batch_size:
        if size < 1:
            raise SpecExtError(f"batch size {size} is not positive")
    return settings


def read_file(path: Path) -> dict[str, Any]:
    """Settings from a JSON or YAML file; raises SpecExtError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecExtError(f"cannot read settings {str(path)!r}: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        import yaml  # comes with vLLM

        try:
            found = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise SpecExtError(f"{path} is not YAML: {error}") from error
    else:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecExtError(f"{path} is not JSON: {error} (YAML files end in .yaml)") from error
    if not isinstance(found, dict):
        raise SpecExtError(f"{path} holds a {type(found).__name__}; expected settings by name")
    return found


def parse_template(text: str | None) -> str | None:
    """A template of a command line: in a shell's quotes, ``\\n`` is easier to type than a break."""
    return None if text is None else text.replace("\\n", "\n")


def parse_batch_sizes(text: str) -> list[int]:
    """Read ``1,8``; raises SpecExtError."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SpecExtError(f"batch sizes {text!r} are not numbers; expected e.g. 1,8") from error


def parse_rates(text: str) -> list[float]:
    """Read ``1,2.5``; raises SpecExtError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise SpecExtError(
            f"request rates {text!r} are not numbers; expected e.g. 0,2.5"
        ) from error


def parse_servers(pairs: Iterable[str]) -> dict[str, str]:
    """Read ``NAME=URL`` pairs; raises SpecExtError."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, url = pair.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise SpecExtError(f"server {pair!r}: expected NAME=http://HOST:PORT")
        if name in found:
            raise SpecExtError(f"server {name!r} is given twice; give each a name of its own")
        found[name] = url
    return found


def parse_engine_args(pairs: Iterable[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs; a value that is JSON is read as JSON, any other is a text.

    Raises:
        SpecExtError: A pair without ``=``, or a key that the benchmark sets itself.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key:
            raise SpecExtError(f"engine argument {pair!r} has no '='; expected key=value")
        if key in ("model", "speculative_config"):
            raise SpecExtError(f"engine argument {key!r}: use --model or --method for that")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = {"True": True, "False": False, "None": None}.get(value, value)
    return found
