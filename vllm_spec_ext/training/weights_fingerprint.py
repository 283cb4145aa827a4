# SPDX-License-Identifier: Apache-2.0
"""What identifies a model's weights: what was made with them is not taken for another model's."""

import hashlib
from pathlib import Path

_SAMPLES = 1024  # places of a file
_BYTES = 4096  # at each
_NO_WEIGHTS = {"training_args.bin", "optimizer.bin"}  # that trainers leave behind


def weights_fingerprint(model: str) -> str | None:
    """16 hexadecimal digits of a folder's weight files, whenever they were written.

    Large files are read at many places, not as a whole: no tensor of a layer is passed over.

    Returns:
        None for a name on the Hub, whose weights are not there yet or not to be changed.
    """
    folder = Path(model).expanduser()
    digest = hashlib.sha256()
    files = list(folder.glob("*.safetensors"))
    files = files or [path for path in folder.glob("*.bin") if path.name not in _NO_WEIGHTS]
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as opened:
            for start in range(0, size, max(_BYTES, size // _SAMPLES)):
                opened.seek(start)
                digest.update(opened.read(_BYTES))
    return digest.hexdigest()[:16] if folder.is_dir() else None
