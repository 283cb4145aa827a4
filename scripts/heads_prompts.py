# SPDX-License-Identifier: Apache-2.0
"""Mix prompts for training heads: a number of lines of each file, and Python functions to write.

    python scripts/heads_prompts.py --out prompts.jsonl --python 400 \
        questions.jsonl.gz:question:600 "sentences.txt:Simplify: :250"

A part is FILE:FIELD:COUNT for .jsonl files, and FILE:TEXT BEFORE EACH LINE:COUNT for others.
"""

import argparse
import ast
import gzip
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def python_functions() -> Iterator[str]:
    """Signature and docstring of the documented functions of Python's standard library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            if 40 <= len(ast.get_docstring(node) or "") <= 600:
                node.body = node.body[:1]
                yield ast.unparse(node) + "\n"


def lines(part: str) -> list[str]:
    """Prompts of one FILE:HOW:COUNT."""
    name, rest = part.split(":", 1)
    how, _ = rest.rsplit(":", 1)
    with (gzip.open if name.endswith(".gz") else open)(name, "rt") as file:
        if ".jsonl" in name:
            return [json.loads(line)[how] for line in file]
        return [how + line.strip() for line in file if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", metavar="FILE:HOW:COUNT")
    parser.add_argument("--python", type=int, default=0, metavar="COUNT")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chance = random.Random(0)
    functions = list(python_functions())
    prompts = chance.sample(functions, min(options.python, len(functions)))
    for part in options.parts:
        found = lines(part)
        prompts += chance.sample(found, min(int(part.rsplit(":", 1)[1]), len(found)))
    chance.shuffle(prompts)
    options.out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    print(f"{len(prompts)} prompts in {options.out}")


if __name__ == "__main__":
    main()
