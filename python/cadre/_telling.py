"""What a script tells the job beside its steps: what a step came to, what it does meanwhile, and what it has saved.

In: calls of the script. Out: words of the session's; nothing without a job.
"""

import os
from typing import Any

import torch

from . import _job
from ._mistakes import names_rank


@names_rank
def report(
    *,
    loss: float | torch.Tensor,
    tokens: int | None = None,
    gradient_norm: float | torch.Tensor = 0.0,
    learning_rate: float | torch.Tensor = 0.0,
    validation_loss: float | torch.Tensor | None = None,
) -> None:
    """Says what the step came to, for logs and live views: the mean loss and the tokens of all ranks (default: the
    rows of this rank times the ranks); `validation_loss` in steps that evaluate documents that are held out."""
    if (step := _job.joined("report").running) is None:
        raise RuntimeError("report was called outside of a step")
    mean, norm, validation = _number("loss", loss), _number("gradient_norm", gradient_norm), None
    rate = _number("learning_rate", learning_rate, ", such as scheduler.get_last_lr()[0]")
    if validation_loss is not None:
        validation = _number("validation_loss", validation_loss)
    if tokens is not None:
        tokens = _count("report: tokens", tokens, "the tokens of all ranks")
    # All of them, or none.
    step.loss, step.tokens, step.gradient_norm, step.learning_rate = mean, tokens, norm, rate
    step.validation_loss = validation
    if of := _job.check():
        of.made.losses.append(step.loss)


def _number(name: str, told: Any, such_as: str = "") -> float:
    """An argument of `report`. An error of a GPU, which is seen here, is none of the argument's."""
    try:
        if _is_one(told):
            return float(told)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"report: {name} is {told!r}, a {type(told).__name__}; give one number{such_as}")


def _is_one(told: Any) -> bool:
    """Whether it may be one number: text and truth values are none, though Python converts them. Torch's own error of a
    tensor with several is of the type that its errors of GPUs have."""
    if isinstance(told, (str, bytes, bytearray, bool)) or str(getattr(told, "dtype", None)) in ("bool", "torch.bool"):
        return False
    return not isinstance(told, torch.Tensor) or told.numel() == 1


def _count(what: str, told: Any, which: str) -> int:
    """A count that the session takes in 64 bits."""
    try:
        if _is_one(told) and (count := int(told)) == told and 0 <= count < 1 << 64:
            return count
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{what} is {told}; give {which}: a whole number from 0 to 2^64 - 1")


@names_rank
def busy(seconds: float) -> None:
    """Says that this rank is at work elsewhere, for so long at most, as when it saves or evaluates the model, and that
    it does not stand still. Its next call of `cadre` ends that. Ranks that wait for it meanwhile say so, too."""
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"busy: seconds is {seconds}; say a time of 0 s or more")
    job = _job.joined("busy")
    if job.session and not job.left:
        job.session.busy(seconds)


@names_rank
def saved(steps: int, path: str | os.PathLike[str] | None = None) -> None:
    """Says that a checkpoint of the script's own is written which holds `steps` steps, of all attempts together, and
    where: restarts of the job before it no longer count. One rank is enough."""
    job = _job.joined("saved")
    steps = _count("saved: steps", steps, "the steps in the checkpoint, those of former attempts too")
    if job.session and not job.left:
        job.session.saved(steps, None if path is None else os.fspath(path))


@names_rank
def stopped() -> bool:
    """Whether the job was asked to stop before its last step, so that the loop has ended early: time to save. The
    process then exits with the code of a job that was stopped."""
    return _job.joined("stopped").stopped
