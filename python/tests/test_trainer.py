"""`Trainer` on the pool in a process that no job has started: what it does at ends of epochs and of training."""

import contextlib
import io
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import cadre.trainer
import torch
from accelerate import ParallelismConfig
from alone import Alone
from cadre import _job
from test_transformers import llama
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

ROWS = [{"input_ids": torch.arange(8) + at, "labels": torch.arange(8) + at} for at in range(3)]


class Pooled(cadre.trainer.OnPool, Trainer):
    pass


class Endless(IterableDataset):
    """An epoch of three batches, and no length."""

    def __init__(self, rows: list = ROWS) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Ends(Alone):
    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def trainer(self, data: Any = ROWS, callbacks: list | None = None, **more: Any) -> Pooled:
        quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 2, "logging_steps": 100}
        arguments = TrainingArguments(output_dir=str(self.folder), **(quiet | sizes | more))
        return Pooled(llama(), arguments, train_dataset=data, eval_dataset=ROWS, callbacks=callbacks)

    def train(self, trainer: Pooled) -> int:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            trainer.train()
        return trainer.state.global_step

    def test_an_epoch_that_ends_within_an_update_is_refused_where_the_loader_has_no_length(self) -> None:
        with self.assertRaisesRegex(NotImplementedError, "ends with 1 of an update's 2 batches"):
            self.train(self.trainer(Endless(), max_steps=4, gradient_accumulation_steps=2))

    def test_a_sized_epoch_that_ends_within_an_update_is_trained(self) -> None:
        self.assertEqual(self.train(self.trainer(num_train_epochs=2, gradient_accumulation_steps=2)), 4)
        self.assertTrue(_job.current().ended)

    def test_an_epoch_that_a_callback_ends_is_compared_with_what_was_announced(self) -> None:
        class Ends(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
                control.should_epoch_stop = True

        self.assertEqual(self.train(self.trainer(Endless(), [Ends()], max_steps=3)), 3)
        others = [{name: it[: 4 + at] for name, it in ROWS[0].items()} for at in range(3)]
        words = r"should_epoch_stop\), .* the update that was announced"
        with mock.patch.object(_job, "_JOB", None), self.assertRaisesRegex(NotImplementedError, words):
            self.train(self.trainer(Endless(others), [Ends()], max_steps=3))

    def test_an_evaluation_of_one_row_is_one_of_whole_documents(self) -> None:
        self.assertEqual(self.train(self.trainer(max_steps=2, eval_strategy="steps", eval_steps=1)), 2)

    def test_training_that_may_end_early_is_refused_when_it_begins(self) -> None:
        early = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
        trainer = self.trainer(callbacks=[EarlyStoppingCallback()], metric_for_best_model="loss", **early)
        with self.assertRaisesRegex(NotImplementedError, "EarlyStoppingCallback"):
            self.train(trainer)

    def test_what_divides_rows_or_heads_among_ranks_is_refused_by_its_name(self) -> None:
        for size in ("cp_size", "sp_size", "tp_size"):
            trainer = self.trainer(max_steps=2)
            # As an accelerator of two processes has it.
            state = trainer.accelerator.state
            self.addCleanup(setattr, state, "parallelism_config", state.parallelism_config)
            state.parallelism_config = ParallelismConfig(**{size: 2})
            calls = next(it for it in trainer.callback_handler.callbacks if isinstance(it, cadre.trainer._Calls))
            with self.assertRaisesRegex(NotImplementedError, f"parallelism_config: {size} is 2; set it to 1"):
                calls.on_train_begin(trainer.args, trainer.state, trainer.control)

    def test_a_resume_without_steps_trains_nothing_and_ends_well(self) -> None:
        # At the end of an epoch of three steps, and within one.
        for steps in (3, 4):
            said, saved = io.StringIO(), self.folder / f"checkpoint-{steps}"
            with mock.patch.object(_job, "_JOB", None):
                self.train(self.trainer(max_steps=steps, save_strategy="steps", save_steps=steps))
            before = (saved / "trainer_state.json").stat().st_mtime_ns
            trainer = self.trainer(max_steps=steps, save_strategy="steps", save_steps=steps)
            with mock.patch.object(_job, "_JOB", None), contextlib.redirect_stderr(said):
                trainer.train(resume_from_checkpoint=str(saved))
                self.assertTrue(_job.current().ended)
            self.assertIn("no step is left to train; the job ends well", said.getvalue())
            self.assertEqual(trainer.state.global_step, steps)
            self.assertEqual((saved / "trainer_state.json").stat().st_mtime_ns, before)

    def test_a_job_that_is_asked_to_stop_is_saved(self) -> None:
        begin, steps = _job.Job.begin, []

        def stopped(job: _job.Job, *layouts: Any) -> bool:
            steps.append(1)
            # The first step of an epoch: Trainer takes it for one without samples, and would say so.
            if len(steps) < 4:
                return begin(job, *layouts)
            job.ended = job.stopped = True
            return False

        quiet = self.assertNoLogs("transformers.trainer", "WARNING")
        with mock.patch.object(_job.Job, "begin", stopped), quiet:
            done = self.train(self.trainer(max_steps=6, save_strategy="steps", save_steps=100))
        self.assertEqual([it.name for it in self.folder.glob("checkpoint-*")], [f"checkpoint-{done}"])


if __name__ == "__main__":
    unittest.main()
