# SPDX-License-Identifier: Apache-2.0
"""vLLM's Ray executor with two tensor-parallel workers, by a device key for tests alone."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_cluster import QUESTIONS, plain_answers, ray_cluster, tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[data,serve]"),
]

ASKED = QUESTIONS[:8]
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, given, found = sys.argv[1:]
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        disable_log_stats=False,
        speculative_config={
            "method": "input_copy", "num_speculative_tokens": 6, "adaptive_length": False
        },
    )
    chats = [[{"role": "user", "content": text}] for text in json.load(open(given))]
    results = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    accepted = values["vllm:spec_decode_num_accepted_tokens"]
    workers = llm.collective_rpc(lambda wrapper: type(wrapper.worker).__name__)
    from prometheus_client import REGISTRY

    labels = {"method": "input_copy", "rule": "exact"}
    counted = REGISTRY.get_sample_value("spec_ext:accepted_nodes_total", labels)
    texts = [r.outputs[0].text for r in results]
    json.dump([texts, accepted, counted, workers], open(found, "w"))
"""


@pytest.mark.timeout(900)
def test_two_workers_by_ray(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    source = Path(__file__).parent / "ray_cpu_platform.py"
    words = "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import ray_cpu_platform as p; "
    words += "p.install(pathlib.Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", words, str(source.parent), str(plugin)], check=True)
    paths = ":".join(filter(None, [str(plugin), os.environ.get("PYTHONPATH")]))
    given, found, script = (tmp_path / name for name in ("given", "found", "engine.py"))
    given.write_text(json.dumps(ASKED))
    script.write_text(ENGINE)
    more = {"PYTHONPATH": paths, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with ray_cluster(4, "--num-gpus", "2", **more) as cluster:
        done = subprocess.run(
            [sys.executable, str(script), str(tiny_model()), str(given), str(found)],
            env={**cluster.environment, **more},
            capture_output=True,
            text=True,
            timeout=700,  # its two workers share two cores with other tests
            check=False,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    answers, accepted, counted, workers = json.loads(found.read_text())
    assert answers == [plain_answers(64)[question] for question in ASKED]
    assert counted == accepted > 0  # by Ray's worker, and by the scheduler here
    assert len(workers) == 2
    assert set(workers) == {"SpecCPUWorker"}
