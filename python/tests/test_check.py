"""`cadre check` as a user calls it: on a job that is right, and on jobs with a fault for each of its checks."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import cadre
import torch
from alone import Alone
from cadre import _job, _verdict
from cadre._check import Calls, Check, Feed, Made, digest, full
from cadre._documents import LOCAL_TICKET
from cadre._layout import Stretch

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"
PROGRAM = Path(os.environ["CADRE_PROGRAMS"]) / "cadre"
AGAIN, REPLICAS = "the same bits in a second run", "the same weights on all ranks"
PLAIN, TOKEN = "loss and gradients of one rank with plain attention", "a token changes its own document alone"
ALONE, LENGTHS = "a document alone has the same attention", "lengths of 1, odd and ragged"
CALLS = "each layer is called once a batch, as announced"
ALL = [CALLS, AGAIN, REPLICAS, PLAIN, TOKEN, ALONE, LENGTHS]


def started(planted: str, *options: str, program: str = sys.executable) -> subprocess.Popen:
    return check([program, HERE / "check_job.py", f"--plant={planted}"], *options)


def check(script: list[str | Path], *options: str) -> subprocess.Popen:
    command = [PROGRAM, "check", "--json", *options, "--", *script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Verdicts(unittest.TestCase):
    def test_gradients_that_are_missing_or_zero_are_found(self) -> None:
        one, none, zero = (Made(gradients=[it]) for it in (torch.ones(2), None, torch.zeros(2)))
        for expected, own, said in (
            (none, none, "no parameter has a gradient when the optimizer makes its step"),
            (zero, one, "all gradients are zero, and those of one rank are not"),
            (none, one, "one rank has gradients of other parameters"),
            (one, one, None),
            (zero, zero, None),
        ):
            found = _verdict.gradients(expected, [own], [])
            self.assertTrue(found is None if said is None else said in found, found)

    def test_bits_of_a_number_and_of_sparse_gradients_are_told_apart(self) -> None:
        one, other = torch.tensor(1.0), torch.tensor(1.0).nextafter(torch.tensor(2.0))
        self.assertNotEqual(digest(one), digest(other))
        embed = torch.nn.Embedding(3, 2, sparse=True)
        embed(torch.tensor([1, 1])).sum().backward()
        self.assertEqual(full(embed.weight.grad).tolist(), [[0, 0], [2, 2], [0, 0]])
        self.assertEqual(digest(embed.weight.grad), digest(full(embed.weight.grad)))

    def test_calls_that_a_pool_refuses_are_told(self) -> None:
        shape = cadre.Shape(2, 1, 8, ("causal", "window:3"))
        rows = [(5, 2, 8), (5, 1, 8), (5, 1, 8)]
        first, second = ("causal", [5], rows, None), ("window:3", None, rows, None)
        for calls, said, are_once in (
            ([first, second], None, True),
            ([first, second, first], "rank 1, step 4: all 2 forward phases were called", False),
            ([first], "rank 1, step 4: attention was called 1 times, and 2 layers were announced", False),
            ([second, first], "layer 0 is causal and the call is window:3", True),
            ([("causal", [2, 3], rows, None), second], r"cu_seqlens say \[2, 3\], announced were \[5\]", True),
            ([("causal", None, [(5, 4, 8), *rows[1:]], None), second], r"layer 0: q is \(5, 4, 8\)", True),
            ([first, ("window:3", None, rows, 0)], "layer 0 is called, and it is the turn of layer 1", True),
        ):
            of = Calls((1, 4), shape, [[Stretch(0, 5, 0, 5)]])
            for it in calls:
                of.take(0, *it)
            of.end()
            self.assertEqual(of.are_once, are_once)
            if said is None:
                self.assertIsNone(of.refused)
            else:
                self.assertRegex(of.refused, said)

    def test_every_check_has_a_line_where_the_job_ends_in_one(self) -> None:
        with tempfile.TemporaryDirectory() as it, mock.patch("atexit.register") as at_exit:
            folder = Path(it)
            (folder / "one").mkdir()
            found = _verdict.Findings(mock.Mock(folder=folder))
            for it in (CALLS, AGAIN, REPLICAS, PLAIN):
                found(it, None)
            about = found.about(TOKEN)
            about.__enter__()
            with mock.patch.object(sys, "last_value", KeyError("tokens"), create=True):
                at_exit.call_args.args[0]()
            told = [json.loads(it) for it in (folder / "findings.jsonl").read_text().splitlines()]
            self.assertEqual([it["check"] for it in told], ALL)
            self.assertEqual([it["verdict"] for it in told], ["ok"] * 4 + ["found"] + ["not tried"] * 2)
            self.assertEqual(told[4]["detail"], "the job ended with KeyError: 'tokens'")
            self.assertIn(TOKEN, told[5]["detail"])
            self.assertTrue((folder / "one" / "ended-0").exists())

    def test_updates_are_tried_up_to_one_in_which_the_optimizer_makes_a_step(self) -> None:
        step, none = Made(weights=[torch.ones(1)]), Made()
        for made, expected in (
            ([step, step], [range(1), range(1, 2)]),
            ([none, step, none, none, step], [range(2), range(2, 5)]),
            ([step, none], [range(1)]),
        ):
            self.assertEqual(_verdict.until_each_step(made), expected)
        with self.assertRaisesRegex(_verdict.NotTriedError, "no optimizer of torch made a step in 2 updates"):
            _verdict.until_each_step([none, none])


class Loops(Alone):
    def setUp(self) -> None:
        super().setUp()
        self.join()
        self.check = mock.Mock(kind="base", updates=[], **{"made.weights": []})
        self.check.feed = Feed(self.check)
        checks = mock.patch.object(_job, "check", return_value=self.check)
        checks.start()
        self.addCleanup(checks.stop)

    def test_loops_that_are_left_are_of_one_check_and_lose_no_batch(self) -> None:
        class Odd:
            """It raises an exception within an update, and goes on; then it takes back what it has given."""

            def __init__(self) -> None:
                self.calls, self.given = 0, []

            def __iter__(self) -> "Odd":
                return self

            def __next__(self) -> dict:
                self.calls += 1
                if self.calls == 4:
                    raise OSError("the disk is away")
                for it in self.given if self.calls == 6 else ():
                    it.clear()
                self.given.append({"call": self.calls, "lengths": [self.calls]})
                return self.given[-1]

        loader, seen = Odd(), []
        for _ in range(7):
            with contextlib.suppress(OSError):
                # Each loop is left in the middle of an update, or behind one.
                seen.append(next(cadre.batches(loader, lambda it: it.pop("lengths"), accumulate=2)))
                seen[-1]["lost"] = seen[-1].pop("call")
        self.assertEqual([it["lost"] for it in seen], [1, 2, 3, 5, 6, 7])
        self.assertEqual([it.args for it in self.check.handed_out.call_args_list], [(0,), (1,)] * 3)
        kept = [update for update, _ in self.check.updates]
        self.assertEqual([it.layouts for it in kept], [[[1], [2]], [[3], [5]]])
        self.assertEqual(kept[1].batches, [{"call": 3}, {"call": 5}])
        self.assertEqual(kept[1].drawn, [{"call": 3, "lengths": [3]}, {"call": 5, "lengths": [5]}])

    def test_micro_batches_that_go_through_a_layer_together_have_the_documents_that_calls_say(self) -> None:
        feed = cadre.batches(iter([[3], [5]]), list, accumulate=2, turns="F0+1 B1+0")
        self.assertEqual([next(feed), next(feed)], [[3], [5]])
        self.assertEqual(Check.announced([3], LOCAL_TICKET), ([3], LOCAL_TICKET))
        feed = cadre.batches(iter([[3], [5]]), list, accumulate=2)
        self.assertEqual([next(feed), next(feed)], [[3], [5]])
        self.assertEqual(Check.announced([3], LOCAL_TICKET)[0], [5])


class Jobs(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        """All of them at once: a check of one rank has work for one processor, and each begins with imports."""
        cls.right = started("late,stages")
        cls.twice = started("twice", "--ranks=1")
        cls.leak = started("leak", "--ranks=1", program="torchrun")
        cls.wrong = started("positions,order,summed,odd")
        cls.trainer = check([sys.executable, HERE / "check_trainer.py"], "--ranks=1")
        cls.spanning = check([sys.executable, EXAMPLES / "pytorch_packed.py", "--rows=300"])
        for it in (cls.right, cls.twice, cls.leak, cls.wrong, cls.trainer, cls.spanning):
            cls.addClassCleanup(it.wait)
            cls.addClassCleanup(it.kill)

    def finds(self, check: subprocess.Popen, expected: dict[str, str], not_tried: tuple[str, ...] = ()) -> None:
        """What is found, with a part of its words; all else is right, or not tried."""
        out, said = check.communicate(timeout=600)
        self.assertEqual((check.returncode, said), (1 if expected else 0, ""))
        found = {it["check"]: it for it in map(json.loads, out.splitlines())}
        self.assertEqual(list(found), ALL)
        for name, verdict in found.items():
            passed = "not tried" if name in not_tried else "ok"
            self.assertEqual(verdict["verdict"], "found" if name in expected else passed, verdict)
            self.assertIn(expected.get(name, ""), verdict["detail"])

    def test_a_job_that_is_right_passes(self) -> None:
        # Its optimizer makes no step in the first update. Its loops are left, and what gets a batch changes it.
        self.finds(self.right, {})

    def test_documents_that_span_ranks_pass(self) -> None:
        self.finds(self.spanning, {})

    def test_a_trainer_that_is_right_passes(self) -> None:
        self.finds(self.trainer, {})

    def test_a_batch_that_goes_through_the_layers_twice_is_found(self) -> None:
        wrong = {CALLS: "rank 0, step 0: all 2 forward phases were called"}
        self.finds(self.twice, wrong, (PLAIN, TOKEN, ALONE, LENGTHS))

    def test_a_mask_that_leaks_is_found(self) -> None:
        wrong = {PLAIN: "step 0: ", TOKEN: "changed document", ALONE: "results alone", LENGTHS: "lengths [1, 1, 3"}
        wrong[CALLS] = "rank 0, step 0: cu_seqlens say [64], announced were [20, 5, 39]"
        self.finds(self.leak, wrong)

    def test_wrong_positions_bits_sums_and_lengths_are_found(self) -> None:
        wrong = {
            AGAIN: "rank 1, step 0: micro-batch 0's attention call 0",
            REPLICAS: "rank 1, before step 1: parameter 0 is not that of rank 0; gradients are not summed",
            PLAIN: "gradients do not depend on the batches of rank 1",
            ALONE: "look at its positions",
            LENGTHS: "IndexError: a document of one row",
        }
        self.finds(self.wrong, wrong)

    def test_a_command_that_cannot_be_tried_is_refused_with_what_it_lacks(self) -> None:
        for command, expected in (
            (["true"], "add two lines: cadre.init(model, steps=N) before the loop, and `for batch in cadre.batches"),
            (["false"], "rank 0 ended with exit status: 1 before anything was tried"),
            (["torchrun", "--max-restarts=2", "train.py"], "has --max-restarts 2"),
            (["/no/such/program"], "/no/such/program does not start"),
        ):
            ended = subprocess.run([PROGRAM, "check", "--", *command], capture_output=True, text=True, check=False)
            self.assertEqual((ended.returncode, ended.stdout), (2, ""), ended.stderr)
            self.assertIn(expected, ended.stderr)


if __name__ == "__main__":
    unittest.main()
