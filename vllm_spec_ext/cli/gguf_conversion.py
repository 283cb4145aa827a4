# SPDX-License-Identifier: Apache-2.0
"""Turns a GGUF model into a Hugging Face folder with plain bfloat16 weights.

``python -m vllm_spec_ext.cli.gguf_conversion GGUF FOLDER`` does it on the command line.
"""

import os
import subprocess
import sys
from pathlib import Path

from vllm_spec_ext.errors import SpecExtError


def dequantise_gguf(gguf: Path, folder: Path) -> None:
    """Write plain bfloat16 weights, the tokenizer and the chat template of a GGUF model.

    Loads torch and starts its threads; a process that will start engines calls
    :func:`dequantise_in_child` instead.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are plain now; left in, it would make every reader look for quantised ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def dequantise_in_child(gguf: Path, folder: Path) -> None:
    """As :func:`dequantise_gguf`, in a process of its own.

    Its memory is returned, its progress bars stay off our terminal, and no thread of torch is
    alive when the caller forks an engine.

    Raises:
        SpecExtError: The conversion failed, with its last line.
    """
    command = [sys.executable, "-m", "vllm_spec_ext.cli.gguf_conversion"]
    done = subprocess.run(
        [*command, str(gguf), str(folder)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},  # all it needs is in the file
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1]
        raise SpecExtError(
            f"converting {gguf.name} failed: {reason}. Check the environment with "
            f"`vllm-spec doctor`; the conversion alone: {' '.join(command)} GGUF FOLDER"
        )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"found {len(sys.argv) - 1} arguments, expected GGUF FOLDER")
    dequantise_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
