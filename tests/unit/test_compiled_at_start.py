# SPDX-License-Identifier: Apache-2.0
"""What is compiled is compiled while an engine starts, not in a user's first request.

Each warm-up compiles all that requests run. A case has a process of its own: a kernel that another
case compiled would hide that one is missing. Two run at a time.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

PREAMBLE = """
import sys

from numba.core.dispatcher import Dispatcher


def compiled():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm_spec_ext"):
            for value in vars(module).values():
                if isinstance(value, Dispatcher):
                    found[f"{name}.{value.py_func.__name__}"] = len(value.signatures)
    return found


def check(at_start):
    late = sorted(name for name, count in compiled().items() if count > at_start.get(name, 0))
    assert any(at_start.values()), "nothing was compiled at all"
    assert not late, late
"""

METHOD = """
import numpy as np

from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import EngineHandle
from vllm_spec_ext.replay import Recording, replay

method_type = registry.load(sys.argv[1])
engine = EngineHandle(500, 4096, 8, 16, "none", lambda: None)
method = method_type(parse_options(method_type.info.options, {}, sys.argv[1]))
method.start(engine)
at_start = compiled()
words = [int(one) for one in np.random.default_rng(0).integers(3, 500, 40)]
foreseen = {(row,): (words[row % 30 : row % 30 + 8], [0.1] * 8) for row in range(40, 80)}
text = Recording(words, words + words[5:] + [7, 8, 9], foreseen=foreseen)
result = replay(method, [text, text], engine)
assert result.tokens_per_step > 1
check(at_start)
"""

ETA = """
import torch

from vllm_spec_ext.scorers.eta import apply_eta, warm_up

warm_up()
at_start = compiled()
apply_eta(torch.randn(3, 64), torch.tensor([0.1, 0.0, 0.2]), torch.tensor([0.0, 0.0, 0.3]))
check(at_start)
"""

TOP_COLUMNS = """
import torch

from vllm_spec_ext.top_columns import top_log_probs, warm_up

warm_up()
at_start = compiled()
top_log_probs(torch.randn(3, 500), 8)
check(at_start)
"""

RULES = """
import torch

from vllm_spec_ext.scorers.build import build_scorer, warm_up
from vllm_spec_ext.scorers.parse import parse_rule
from vllm_spec_ext.scorers.rules.base import Verification

parts = [
    {"type": "top_k", "k": 3},
    {"type": "tolerance", "beta": 5},
    {"type": "distance", "epsilon": 2},
    {"type": "min_block", "length": 2},
]
scorer = build_scorer(parse_rule({"type": "any_of", "rules": parts}), allow_lossy=True)
warm_up(scorer)
at_start = compiled()
nodes = torch.arange(3)
for size in (500, 5000):
    logits = torch.randn(3, size)
    exact_only = torch.zeros(3, dtype=torch.bool)
    scorer.tolerated(Verification(logits, nodes, nodes, torch.zeros_like(nodes), exact_only))
check(at_start)
"""

WALK = """
import numpy as np
import torch

from vllm_spec_ext.scorers.walk.tree import walk, walk_samples, warm_up

warm_up()
at_start = compiled()
tree = np.array([-1, 0, -1, -1]), np.array([5, 6, 7, 5]), np.array([0, 3, 4])
choices = np.array([5, 6, 9, 8, 5, 3], np.int32)
assert walk_samples(*tree, choices).num_accepted.tolist() == [2, 1]
walk(*tree, choices, tolerated=torch.ones(4, dtype=torch.bool), draft_logits=torch.zeros(4))
check(at_start)
"""

MULTI_STEP = """
import numpy as np
import torch

from vllm_spec_ext.scorers.walk.multi_step import draw_uniforms, multi_step, warm_up

warm_up()
at_start = compiled()
starts, rows = np.array([0, 3]), torch.full((4, 8), 0.125)
tree = np.array([-1, 0, -1]), np.array([5, 6, 7])
for kind in ("iid", "without_replacement"):
    multi_step(rows, *tree, starts, rows[:3], uniforms=draw_uniforms(starts), drawn=kind)
check(at_start)
"""

PLAN = """
import numpy as np

from vllm_spec_ext.engine.trees.plan import RequestRows, build_plan, warm_up

warm_up()
at_start = compiled()
requests = [RequestRows(0, 4, 5, [-1, 0, -1]), RequestRows(4, 2, 3), RequestRows(6, 3, 9, [-1, -1])]
blocks = [np.arange(4, dtype=np.int32) + 4 * row for row in range(3)]
plan = build_plan(requests, blocks, 4, np.arange(20, 28))
assert len(plan.request_of) > 3
plan.commits(np.array([[2, -1], [-1, -1], [1, -1]]), np.array([1, 0, 1]))
check(at_start)
"""

METHODS = ("input_copy", "adaptive_ngram", "suffix_tree", "recycling", "auto")
CASES = {
    **dict.fromkeys(METHODS, METHOD),
    "eta": ETA,
    "rules": RULES,
    "top_columns": TOP_COLUMNS,
    "walk": WALK,
    "multi_step": MULTI_STEP,
    "plan": PLAN,
}


def _failure_of(name: str) -> str:
    command = [sys.executable, "-c", PREAMBLE + CASES[name], name]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    return f"{name}: {run.stderr[-500:]}" if run.returncode else ""


def test_no_kernel_is_compiled_by_a_request() -> None:
    with ThreadPoolExecutor(2) as pool:
        failures = [found for found in pool.map(_failure_of, CASES) if found]
    assert not failures, "\n".join(failures)
