# SPDX-License-Identifier: Apache-2.0
"""Uploading a finished folder to the Hugging Face Hub."""

from pathlib import Path

from vllm_spec_ext.errors import SpecExtError


def push_to_hub(folder: Path, repository: str) -> str:
    """Upload a folder to the Hugging Face Hub; the address of the commit.

    Args:
        folder: Finished heads or draft model.
        repository: ``user/name``; made if it does not exist. The login is huggingface_hub's own.

    Raises:
        SpecExtError: Not logged in, no right, or no network.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(folder)))
    except Exception as error:
        raise SpecExtError(
            f"uploading {folder} to {repository!r} failed ({type(error).__name__}: {error}); the "
            "folder itself is complete. Log in with 'hf auth login' and try again"
        ) from error
