"""What a script tells the job beside its steps: what a step came to, what it does meanwhile, and what it has saved.

In: calls of the script. Out: words of the session's; nothing without a job.
"""

import os

import torch

from . import _job
from ._mistakes import names_rank


@names_rank
def report(
    *,
    loss: float | torch.Tensor,
    tokens: int | None = None,
    gradient_norm: float | torch.Tensor = 0.0,
    learning_rate: float = 0.0,
    validation_loss: float | torch.Tensor | None = None,
) -> None:
    """Says what the step came to, for logs and live views: the mean loss and the tokens of all ranks (default: the
    rows of this rank times the ranks); `validation_loss` in steps that evaluate documents that are held out."""
    if (step := _job.joined("report").running) is None:
        raise RuntimeError("report was called outside of a step")
    if tokens is not None and (tokens < 0 or tokens != int(tokens)):
        raise ValueError(f"report: tokens is {tokens}; give the tokens of all ranks, 0 or more")
    step.loss, step.tokens = float(loss), None if tokens is None else int(tokens)
    if of := _job.check():
        of.made.losses.append(step.loss)
    step.gradient_norm, step.learning_rate = float(gradient_norm), learning_rate
    step.validation_loss = None if validation_loss is None else float(validation_loss)


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
    if steps < 0 or steps != int(steps):
        raise ValueError(f"saved: steps is {steps}; give the steps in the checkpoint, those of former attempts too")
    if job.session and not job.left:
        job.session.saved(int(steps), None if path is None else os.fspath(path))


@names_rank
def stopped() -> bool:
    """Whether the job was asked to stop before its last step, so that the loop has ended early: time to save. The
    process then exits with the code of a job that was stopped."""
    return _job.joined("stopped").stopped
