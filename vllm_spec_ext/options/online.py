# SPDX-License-Identifier: Apache-2.0
"""Options of online distillation: ``{"online": {...}}`` beside those of a method that learns."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from vllm_spec_ext.options.base import Options


class OnlineOptions(Options):
    """``online``: a drafter that learns while it serves."""

    folder: Annotated[str, StringConstraints(min_length=1)]
    """Folder of this drafter's samples and versions, made if missing; one that holds something else
    is refused. An engine that is started on it again goes on with the version that was kept last.
    """

    record: Literal["unsalted", "all"] = "unsalted"
    """Which requests are learned from. ``"unsalted"``: those without a ``cache_salt``, where these
    share what is learned (offline; on a server with ``share_unsalted``). ``"all"``: every request;
    what one tenant wrote then trains the drafter of all. A request with ``remember=false`` is
    never recorded."""

    requests: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the requests that are recorded."""

    others: float = Field(default=0.25, ge=0.0, le=1.0)
    """Share of the positions without a failed draft that are recorded beside all those with one."""

    likeliest: int = Field(default=16, ge=1, le=256)
    """Most likely tokens of the target that are recorded at a position; all others count as one."""

    buffer_mb: float = Field(default=32.0, gt=0.0, le=65536.0)
    """Most memory of samples that are not on disk yet; what comes beyond is not recorded."""

    disk_mb: float = Field(default=256.0, ge=1.0, le=1048576.0)
    """Most disk space of samples. When it is full, older samples make room at random, so that what
    stays is newest text and an ever thinner choice of all text before."""

    start_trainer: bool = False
    """Start the trainer with the engine and end it with it; ``false`` leaves that to
    ``vllm-spec online train FOLDER``, on this machine or one that shares the folder."""

    budget: float = Field(default=0.1, ge=0.0, le=64.0)
    """Cores that the trainer may use on average; 0.1 = a tenth of one. 0 = record, do not train."""

    device: str = "cpu"
    """Where the trainer trains: ``cpu``, ``cuda`` or ``cuda:1``."""

    loss: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    """Divergence between target and drafter that is made small: KL(target || drafter),
    KL(drafter || target), or the mean of both to their average."""

    learning_rate: float = Field(default=3e-5, gt=0.0, le=1.0, allow_inf_nan=False)
    """Of AdamW, constant after a short rise. With few requests a higher one, or a smaller batch,
    makes trained heads worse on the next."""

    batch_size: int = Field(default=128, ge=1, le=4096)
    """Positions of a training step."""

    passes: float = Field(default=4.0, gt=0.0, le=1e6, allow_inf_nan=False)
    """Times that a sample is trained on, on average; then the trainer waits for new ones. More than
    a few passes over some hundred requests make trained heads worse again on the next."""

    replay: float = Field(default=0.5, ge=0.0, lt=1.0)
    """Share of a batch that is drawn from all samples on disk, against forgetting; the rest is
    drawn from the newest."""

    publish_steps: int = Field(default=50, ge=1)
    """Training steps between two versions."""

    trial_steps: int = Field(default=400, ge=16)
    """Requests' steps that a new version drafts, among as many of the version in use, before it is
    kept or refused."""

    guard: float = Field(default=0.02, ge=0.0, le=0.5)
    """Share of the steps that the weights of the start go on drafting. They say what was gained;
    if the version in use falls behind them, they come back. 0 = never."""

    seed: int = Field(default=0, ge=0)
    """Of all random choices."""
