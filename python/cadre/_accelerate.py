"""What Accelerate asks the loader that its script loops over: whether the batch is the last of an epoch.

In: loops over `batches`, which has drawn from the loader ahead of the script. Out: the loop stands in for the loader
in Accelerate's state, so that `accumulate` ends an update, and `gather_for_metrics` cuts, where they do without Cadre.
A process that has made no `Accelerator` is let be.
"""

import sys
from typing import Any


def handed_out(feed: Any) -> None:
    """The script has got a batch of `feed`."""
    if (state := _state()) and state.active_dataloader is not feed:
        _remove(state, feed)
        state._add_dataloader(feed)


def ended(feed: Any) -> None:
    """The loop is over."""
    if state := _state():
        _remove(state, feed)


def _remove(state: Any, feed: Any) -> None:
    # Older releases raise where it is not there.
    if any(it is feed for it in state.dataloader_references):
        state._remove_dataloader(feed)


def _state() -> Any:
    module = sys.modules.get("accelerate.state")
    kept = getattr(module, "GradientState", None)
    return kept() if kept and kept._shared_state else None
