"""`Trainer` of transformers on the pool, and classes made of it (TRL's, one's own).

    class Pooled(cadre.trainer.OnPool, transformers.Trainer):
        pass

In: a model with `attn_implementation="cadre"`, batches that say their documents (`cu_seq_lens_q`, or rows that are
whole documents). Out: a training that joins the job when it begins and leaves it when it ends; an update is a step of
the pool, announced while the one before runs. Evaluation is computed in this process. It joins with the steps that are
left, so that a resume from Trainer's own checkpoint is a job of its own.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback

# Registers the attention.
from . import _check, _job, _local, _telling, transformers  # noqa: F401
from ._layout import lengths_of
from ._mistakes import names_rank

_LOGGER = logging.getLogger("transformers.trainer")


def _passes(record: logging.LogRecord) -> bool:
    """Passes what Trainer says, but for its warning of an epoch without samples."""
    return "not to be a single sample" not in str(record.msg)


class _Calls(TrainerCallback):
    """Callbacks that join the job, report steps and leave."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @names_rank
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if any(isinstance(it, EarlyStoppingCallback) for it in self.trainer.callback_handler.callbacks):
            raise NotImplementedError("EarlyStoppingCallback: a job makes all of its steps; leave it out")
        parallel = getattr(self.trainer.accelerator, "parallelism_config", None)
        for name in ("cp_size", "sp_size", "tp_size"):
            if (size := getattr(parallel, name, 1) or 1) > 1:
                raise NotImplementedError(
                    f"parallelism_config: {name} is {size}; set it to 1: a rank holds its own rows with all their "
                    "heads, and the pool shares out attention"
                )
        left = max(0, state.max_steps - state.global_step)
        # Accelerate's autocast is around the forward alone.
        dtype = torch.bfloat16 if args.bf16 else None
        _job.init(self.trainer.model, steps=left, seed=args.seed, dtype=dtype)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:  # noqa: ARG002
        if "loss" in logs and _job.running():
            norm, rate = logs.get("grad_norm", 0.0), logs.get("learning_rate", 0.0)
            _telling.report(loss=logs["loss"], gradient_norm=norm, learning_rate=rate)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero:
            _telling.saved(state.global_step, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        _LOGGER.removeFilter(_passes)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        _job.finish()


if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class OnPool(Base):
    """See the module. Comes before the base class in the bases of a pooled trainer."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # The epoch's iterator, and the update that was drawn from it ahead.
        self._ahead: tuple[Iterator, tuple[list, Any]] | None = None
        self._micro_batch = 0
        self.add_callback(_Calls(self))

    @names_rank
    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Begins a step with the batches of an update, and announces those of the next one."""
        if check := _job.check():
            return self._get_checked(check, epoch_iterator, num_batches, device)
        job, ahead, self._ahead = _job.joined("get_batch_samples"), self._ahead, None
        update = ahead[1] if ahead and ahead[0] is epoch_iterator else None
        if update is None:
            update = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not update[0]:
            return update
        if len(update[0]) < num_batches:
            raise NotImplementedError(
                f"an epoch ends with {len(update[0])} of an update's {num_batches} batches: Trainer makes no update of "
                "them where the loader has no length; give epochs a multiple of gradient_accumulation_steps batches"
            )
        layouts = [lengths_of(it) for it in update[0]]
        if ahead and ahead[0] is not epoch_iterator and [lengths_of(it) for it in ahead[1][0]] != layouts:
            raise NotImplementedError(
                "an epoch was ended before its batches were (control.should_epoch_stop), and the next one begins with "
                f"documents of {layouts} rows, which are not those of the update that was announced; let epochs end by "
                "themselves"
            )
        following = None
        if job.next + 1 < job.steps:
            # At the end of an epoch there are fewer, or none.
            after = super().get_batch_samples(epoch_iterator, self.args.gradient_accumulation_steps, device)
            if after[0]:
                self._ahead = (epoch_iterator, after)
                following = [lengths_of(it) for it in after[0]]
        self._micro_batch = 0
        if _job.begin_step(layouts, next=following):
            return update
        # The job was asked to stop, or a resume has no step left. Trainer takes that for an epoch without samples.
        _LOGGER.addFilter(_passes)
        self.control.should_training_stop = True
        self.control.should_save = job.stopped and self.args.save_strategy != "no"
        return [], None

    def _get_checked(
        self, check: _check.Check, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Any]:
        """Returns an update of the check instead of one of the loader."""
        drawn = super().get_batch_samples
        job = _job.joined("get_batch_samples")
        batches = check.feed.begin(job, lengths_of, lambda: drawn(epoch_iterator, num_batches, device)[0])
        if len(batches) != num_batches:
            raise ValueError(
                f"cadre check: an update has {len(batches)} batches and an epoch ends with {num_batches}; give "
                "epochs 12 updates or more for it"
            )
        # Whatever number of steps the arguments gave.
        self.state.max_steps = max(self.state.max_steps, self.state.global_step + 2)
        self._micro_batch = 0
        return batches, self._get_num_items_in_batch(batches, device)

    def training_step(self, *args: Any, **more: Any) -> torch.Tensor:
        if self._micro_batch:
            _job.next_micro_batch()
        if check := _job.check():
            check.handed_out(self._micro_batch)
        self._micro_batch += 1
        return super().training_step(*args, **more)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        if _job.current():
            # A part of an evaluation that may be long.
            _telling.busy(0)
        ids = inputs.get("input_ids")
        if ids is not None and len(ids) == 1 and not {"cu_seq_lens_q", "position_ids"} & set(inputs):
            ends = torch.tensor([0, ids.shape[1]], dtype=torch.int32, device="cpu")
            inputs = {**inputs, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        with _local.local():
            return super().prediction_step(model, inputs, *args, **more)
