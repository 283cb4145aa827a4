# SPDX-License-Identifier: Apache-2.0
"""Answer a data set on a Ray cluster; kill it at any time, and the next run does the rest.

Usage: python examples/ray_batch.py QUESTIONS ANSWERS [MODEL]

QUESTIONS is .jsonl or .parquet with `id`, `question` and `source_text` (what to copy from, or
nothing); ANSWERS a folder for Parquet files. Two replicas and their helpers take 5 of Ray's CPUs;
where there are fewer cores: ray start --head --num-cpus 8
"""

import json
import os
import sys

import ray
from ray.data.checkpoint import CheckpointConfig
from ray.data.llm import build_processor, vLLMEngineProcessorConfig


def ask(row: dict) -> dict:
    """What vLLM gets of a row; options of a request are JSON, as rows must have equal fields."""
    options = json.dumps({"source_text": row["source_text"]} if row["source_text"] else {})
    params = {"temperature": 0.0, "max_tokens": 64, "extra_args": {"spec_ext": options}}
    messages = [{"role": "user", "content": row["question"]}]
    return {"messages": messages, "sampling_params": params}


def keep(row: dict) -> dict:
    """What is written of a row: the answer, and what became of its drafts."""
    drafts = row["metrics"]["speculative_decoding"]
    kept = {name: drafts[name] for name in ("num_draft_tokens", "num_accepted_draft_tokens")}
    num_tokens = row["num_generated_tokens"]
    return {"id": row["id"], "answer": row["generated_text"], "num_tokens": num_tokens, **kept}


if __name__ == "__main__":
    questions, answers = (p if "://" in p else os.path.abspath(p) for p in sys.argv[1:3])
    model = sys.argv[3] if len(sys.argv) > 3 else "HuggingFaceTB/SmolLM2-135M-Instruct"
    config = vLLMEngineProcessorConfig(
        model_source=model,
        concurrency=(2, 2),  # replicas: at least, at most
        placement_group_config={"bundle_per_worker": {"CPU": 1}},  # or {"GPU": 1}
        runtime_env={"env_vars": {"VLLM_CPU_KVCACHE_SPACE": "1"}},
        batch_size=16,
        chat_template_stage={"num_cpus": 0.1, "concurrency": 1},
        tokenize_stage=False,  # vLLM does it
        detokenize_stage=False,
        engine_kwargs={
            "max_model_len": 1024,
            "enforce_eager": True,  # for CPUs
            "per_request_spec_decode_metrics": "summary",
            "speculative_config": {"method": "input_copy", "share_unsalted": True},  # all is ours
        },
    )
    done = CheckpointConfig("id", f"{answers}.done", delete_checkpoint_on_success=False)
    ray.data.DataContext.get_current().checkpoint_config = done
    read = ray.data.read_parquet if questions.endswith(".parquet") else ray.data.read_json
    rows = read(questions).repartition(target_num_rows_per_block=16)  # written one by one
    build_processor(config, preprocess=ask, postprocess=keep)(rows).write_parquet(answers)
