"""`cadre.observe` in jobs that use nothing else of Cadre: a loop of one's own, and `Trainer`; and the report of it."""

import contextlib
import copy
import dataclasses
import io
import json
import os
import pickle
import subprocess
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cadre
import torch
from cadre import _observe
from cadre._observe import documents_of
from test_transformers import llama
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

PROGRAM = Path(os.environ["CADRE_PROGRAMS"]) / "cadre"
SHAPE = cadre.Shape(4, 2, 64, ("causal",))
PLAIN = {"attn_implementation": "sdpa", "hidden_size": 256}


def packed(lengths: list[int]) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(it) for it in lengths])[None]
    return {"input_ids": positions % 64, "labels": positions % 64, "position_ids": positions}


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError


class Observed(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        return [json.loads(it) for it in (self.folder / f"rank-{rank}.jsonl").read_text().splitlines()]

    def report(self, *options: str) -> tuple[int, str, str]:
        command = [PROGRAM, "observe", "report", self.folder, *options]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout, ended.stderr

    def test_a_loop_of_ones_own_is_logged_and_reported(self) -> None:
        # Two batches a step; an evaluation, and two optimizers, are no steps.
        steps = [[[5, 3], [8]], [[16], [1, 15]], [[2, 2, 2], [40]]]
        for rank in range(2):
            model = llama(**PLAIN)
            one, other = (torch.optim.SGD(it.parameters(), lr=0.1) for it in (model.model, model.lm_head))
            observer = cadre.observe(model, self.folder, ranks=(rank, 2))
            for step in steps:
                for lengths in step:
                    model(**packed(lengths)).loss.backward()
                with torch.no_grad():
                    model(**packed([7]))
                one.step()
                other.step()
            observer.close()
            model(**packed([9])).loss.backward()
            one.step()
        head, *lines = self.lines(rank=1)
        self.assertEqual((head["rank"], head["ranks"], head["layers"]), (1, 2, ["causal"] * 2))
        self.assertEqual(head["heads"], [4, 2, 64])
        self.assertEqual([it["documents"] for it in lines], steps)
        for it in lines:
            self.assertTrue(0 < it["seconds_forward"] < it["seconds"] and it["seconds_before"] >= 0)
        code, out, said = self.report("--profile=h200-hopper", "--json")
        self.assertEqual(code, 0, said)
        report = json.loads(out)
        self.assertEqual((report["steps"], report["longest_document"], report["rows_per_step"]), (2, 40, 78.0))
        # Milliseconds of a step against microseconds of attention.
        self.assertFalse(report["gains"])
        code, _, said = self.report()
        self.assertEqual(code, 2)
        self.assertIn("cadre calibrate --head-dim 64", said)

    def test_a_forward_that_is_tried_again_counts_once(self) -> None:
        model = llama(**PLAIN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Layers are computed again in the backward, and so is the whole model.
        model.gradient_checkpointing_enable()
        observer = cadre.observe(model, self.folder)
        rows = torch.ones(1, requires_grad=True)

        def loss(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
            return model(**packed(lengths)).loss * rows

        for reentrant in (False, True):
            checkpoint(loss, rows, [5, 3], use_reentrant=reentrant).backward()
            optimizer.step()
        # A forward or a backward that ends with an exception is tried again.
        broken = model.lm_head.register_forward_pre_hook(out_of_memory)
        with self.assertRaises(torch.OutOfMemoryError):
            model(**packed([9]))
        broken.remove()
        model(**packed([4])).loss.backward()
        optimizer.step()
        broken = model.model.embed_tokens.weight.register_hook(out_of_memory)
        with self.assertRaises(torch.OutOfMemoryError):
            model(**packed([6, 2])).loss.backward()
        broken.remove()
        for _ in range(2):
            model(**packed([6])).loss.backward()
        optimizer.step()
        observer.close()
        found = [it["documents"] for it in self.lines()[1:]]
        self.assertEqual(found, [[[5, 3]], [[5, 3]], [[4]], [[6], [6]]])

    def test_a_trainer_is_logged_by_one_line(self) -> None:
        rows = [{"input_ids": list(range(it))} for it in (3, 9, 27, 5)]
        for collator, expected in (
            (DataCollatorWithFlattening(return_flash_attn_kwargs=True), [[3, 9], [27, 5]]),
            (DataCollatorWithFlattening(), [[3, 9], [27, 5]]),
            (None, [[3, 3], [3, 3]]),
        ):
            data = rows if collator else [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
            quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
            arguments = TrainingArguments(
                output_dir=str(self.folder), per_device_train_batch_size=2, max_steps=2, **quiet
            )
            model = llama(**PLAIN)
            observer = cadre.observe(model, self.folder)
            trainer = Trainer(model, arguments, train_dataset=data, data_collator=collator)
            sampler = torch.utils.data.SequentialSampler(data)
            trainer._get_train_sampler = lambda *_, sampler=sampler: sampler
            with contextlib.redirect_stdout(io.StringIO()):
                trainer.train()
            observer.close()
            # Each start has a head of its own.
            self.assertEqual([it["documents"] for it in self.lines()[-2:]], [[it] for it in expected])

    def test_documents_are_found_where_frameworks_say_them(self) -> None:
        def check(expected: list[int], *arguments: Any, **named: Any) -> None:
            self.assertEqual(documents_of(arguments, named)(), expected)

        ends, tokens = torch.tensor([0, 2, 6], dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)
        check([2, 4], tokens, cu_seqlens=ends)
        check([2, 4], {"input_ids": tokens, "cu_seq_lens_q": ends})
        check([2, 4], packed_seq_params=type("PackedSeqParams", (), {"cu_seqlens_q": ends}))
        # Documents of 0 rows, and room that the batch did not need.
        check([2, 4], tokens, cu_seqlens=torch.tensor([0, 0, 2, 2, 6, 6, 6]))
        check([], tokens, cu_seqlens=torch.tensor([0, 0]))
        with self.assertRaisesRegex(ValueError, "each number is higher"):
            documents_of((tokens,), {"cu_seqlens": torch.tensor([0, 4, 2])})()
        check([3, 3], tokens)
        check([1, 2, 3], tokens, positions=torch.tensor([[0, 0, 1], [0, 1, 2]]))
        check([3, 3], input_ids=tokens, position_ids=torch.tensor([[0, 1, 2]]))
        check([2, 3], input_ids=tokens, attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]))
        with self.assertRaisesRegex(ValueError, "give `layout`"):
            documents_of((), {"pixels": tokens})

    def test_a_job_goes_on_whatever_its_observer_meets(self) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def observed(layouts: list, **more: Any) -> str:
            observer, said = None, io.StringIO()
            with contextlib.redirect_stderr(said):
                observer = cadre.observe(model, self.folder, shape=SHAPE, **more)
                for it in layouts:
                    model(it).sum().backward()
                    optimizer.step()
                observer.close()
            return said.getvalue()

        def layout(rows: torch.Tensor) -> list[int]:
            return [4, 3 // (len(rows) - 4)]

        rows = [torch.ones(it, 4) for it in (5, 4, 7, 4)]
        said = observed(rows, layout=layout)
        self.assertEqual([it["documents"] for it in self.lines()[1:]], [[[4, 3]], [[4, 1]]])
        self.assertEqual(said.count("\n"), 1, said)
        self.assertIn("step 1 is not logged, nor any other whose documents are not known: ZeroDivisionError", said)
        full = self.folder / "rank-1.jsonl"
        full.symlink_to("/dev/full")
        said = observed(rows, ranks=(1, 2), layout=len)
        self.assertEqual(said.count(f"{full} takes no more lines"), 1, said)

    def test_forwards_that_no_optimizer_follows_are_not_kept_for_good(self) -> None:
        model, said = nn.Linear(4, 4), io.StringIO()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mock.patch.object(_observe, "FORWARDS", 3), contextlib.redirect_stderr(said):
            observer = cadre.observe(model, self.folder, shape=SHAPE, layout=lambda rows: [len(rows)])
            for forwards in (3, 4, 2, 9, 1):
                for _ in range(forwards):
                    model(torch.ones(forwards, 4)).sum().backward()
                    self.assertLessEqual(len(observer._forwards), 3)
                optimizer.step()
            observer.close()
        found = [(it["step"], it["documents"]) for it in self.lines()[1:]]
        self.assertEqual(found, [(0, [[3]] * 3), (2, [[2]] * 2), (4, [[1]])])
        self.assertEqual(said.getvalue().count("\n"), 1)
        words = "step 1 is not logged, nor any other with more than 3 forwards before an optimizer of torch"
        self.assertIn(words, said.getvalue())

    def test_a_model_returns_what_it_does_without_its_observer(self) -> None:
        class Odd:
            def __iter__(self) -> Iterator:
                raise ValueError("nobody has to iterate it")

        class Closed(dict):
            def values(self) -> Any:
                raise RuntimeError("nobody may look into it")

        @dataclasses.dataclass
        class Told:
            loss: torch.Tensor

        model, whole = nn.Linear(4, 4), nn.Module()
        whole.forward = lambda rows, made: made(model(rows))
        observer = cadre.observe(whole, self.folder, shape=SHAPE, layout=lambda rows, _: [len(rows)])
        rows = torch.ones(3, 4)
        self.assertEqual(len(list(whole(rows, lambda rows: (it for it in rows)))), 3)
        for odd in (Odd, Closed):
            self.assertIsInstance(whole(rows, lambda _, odd=odd: odd()), odd)
        # The end of the backward is seen.
        for made in (lambda it: it, lambda it: [it], lambda it: {"loss": it}, Told):
            rows = whole(rows, made)
            rows = rows.loss if isinstance(rows, Told) else rows["loss"] if isinstance(rows, dict) else rows
            rows = rows[0] if isinstance(rows, list) else rows
            self.assertEqual(len(rows._backward_hooks), 1)
        observer.close()

    def test_copies_of_a_model_are_not_observed(self) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        observer = cadre.observe(model, self.folder, shape=SHAPE, layout=lambda rows: [len(rows)])
        # As averages of weights, and checkpoints of whole models, which may be read where the package is not.
        written = pickle.dumps(model)
        self.assertNotIn(b"cadre", written)
        for it in (copy.deepcopy(model), pickle.loads(written)):
            it(torch.ones(2, 4)).sum().backward()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        observer.close()
        self.assertEqual([it["documents"] for it in self.lines()[1:]], [[[3]]])

    def test_a_model_of_ones_own_says_its_shape_and_its_documents(self) -> None:
        model = nn.Linear(4, 4)
        with self.assertRaisesRegex(TypeError, "give `shape`, a cadre.Shape"):
            cadre.observe(model, self.folder)
        with self.assertRaisesRegex(ValueError, r"ranks is \(2, 2\)"):
            cadre.observe(model, self.folder, ranks=(2, 2))
        shape = cadre.Shape(4, 2, 64, ("causal", "window:16"))
        observer = cadre.observe(model, self.folder, shape=shape, layout=lambda rows: [len(rows)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in (3, 5):
            model(torch.ones(rows, 4)).sum().backward()
            optimizer.step()
        observer.close()
        head, *lines = self.lines()
        self.assertEqual(head["layers"], ["causal", "window:16"])
        self.assertEqual([it["documents"] for it in lines], [[[3]], [[5]]])


if __name__ == "__main__":
    unittest.main()
