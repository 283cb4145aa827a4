# SPDX-License-Identifier: Apache-2.0
"""Files of the parts that are measured; a run that is repeated measures only what is missing."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vllm_spec_ext.atomic import read_json, write_json
from vllm_spec_ext.bench.records import EngineFacts, Run
from vllm_spec_ext.errors import SpecExtError

FORMAT = "gpu-bench part 1"


@dataclass(frozen=True)
class Measured:
    """What one engine did."""

    facts: EngineFacts
    runs: list[Run]


class PartsFolder:
    """The parts of one model under one set of conditions."""

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        """Look at no file yet.

        Args:
            folder: Made when the first part is kept.
            conditions: JSON-ready; parts that were measured under others are refused.
        """
        self.folder = folder
        self._conditions = dict(conditions)

    def path(self, name: str) -> Path:
        """File of a part."""
        return self.folder / f"{name}.json"

    def keep(self, name: str, measured: Measured) -> None:
        """Write a part, whole or not at all."""
        whole = {
            "format": FORMAT,
            "conditions": self._conditions,
            "facts": dataclasses.asdict(measured.facts),
            "runs": [dataclasses.asdict(run) for run in measured.runs],
        }
        write_json(self.path(name), whole)

    def find(self, name: str) -> Measured | None:
        """A part that was measured before; None if it was not.

        Raises:
            SpecExtError: It was measured under other conditions, or its file is damaged.
        """
        path = self.path(name)
        if not path.exists():
            return None
        data = read_json(path)
        if data.get("format") != FORMAT:
            raise SpecExtError(
                f"{path}: found format {data.get('format')!r}, expected {FORMAT!r}; {self._way_out}"
            )
        differences = unlike(data.get("conditions", {}), self._conditions)
        if differences:
            raise SpecExtError(
                f"{path} was measured under other conditions: {'; '.join(differences)}. "
                f"{self._way_out[0].upper()}{self._way_out[1:]}"
            )
        try:
            return Measured(
                TypeAdapter(EngineFacts).validate_python(data["facts"]),
                TypeAdapter(list[Run]).validate_python(data["runs"]),
            )
        except (KeyError, ValidationError) as error:
            raise SpecExtError(f"{path} is damaged: {error}; {self._way_out}") from error

    def forget(self, names: Sequence[str]) -> None:
        """Delete parts, so that they are measured again."""
        for name in names:
            self.path(name).unlink(missing_ok=True)

    @property
    def _way_out(self) -> str:
        return "choose another folder (--out), or measure all again (--fresh)"


def unlike(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Conditions that differ, each with both values."""
    return [
        f"{name}: found {found.get(name)!r}, expected {expected.get(name)!r}"
        for name in dict.fromkeys([*expected, *found])
        if found.get(name) != expected.get(name)
    ]
