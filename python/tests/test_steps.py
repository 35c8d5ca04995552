"""Steps of a process that no job has started: whose documents a call takes, and what is refused.

Each test begins with a process in which `init` was not called.
"""

import contextlib
import io
import unittest
from unittest import mock

import cadre
import torch
from cadre import _job, _kept, _layout
from torch import Tensor

ROWS = 8
ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)


def attend(q: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    return cadre.flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, ROWS, ROWS, causal=True)


def rows() -> Tensor:
    return torch.randn(ROWS, 2, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


class Alone(unittest.TestCase):
    """A job of one rank without a session."""

    def setUp(self) -> None:
        for it in (
            mock.patch.object(_job, "_JOB", None),
            mock.patch.object(_job.atexit, "register"),
            mock.patch.object(_job.os, "register_at_fork"),
        ):
            it.start()
            self.addCleanup(it.stop)

    def join(self, steps: int = 3) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            cadre.init(cadre.Shape(2, 2, 8, ("causal",)), steps=steps)


class Documents(Alone):
    def test_under_local_the_documents_of_the_step_are_not_taken(self) -> None:
        self.join()
        cadre.begin_step([3, 5])
        whole = attend(rows(), torch.tensor([0, ROWS]))
        with cadre.local():
            with self.assertRaisesRegex(ValueError, "under cadre.local.* pass cu_seqlens"):
                attend(rows())
            self.assertTrue(torch.equal(attend(rows(), torch.tensor([0, ROWS])), whole))
        # Without local() they are.
        self.assertTrue(torch.equal(attend(rows()), attend(rows(), ENDS)))

    def test_a_backward_has_the_documents_of_its_forward(self) -> None:
        self.join()
        cadre.begin_step([3, 5])
        q = rows()
        expected = torch.autograd.grad(attend(q, ENDS).square().sum(), q)[0]
        own, given = attend(q).square().sum(), attend(q, ENDS).square().sum()
        found = torch.autograd.grad(own, q, retain_graph=True)[0]
        self.assertTrue(torch.equal(found, expected))
        cadre.begin_step([ROWS])
        with self.assertRaisesRegex(RuntimeError, "backward of step 0 while step 1 runs"):
            torch.autograd.grad(own, q)
        self.assertTrue(torch.equal(torch.autograd.grad(given, q)[0], expected))

    def test_cu_seqlens_rise_in_one_dimension(self) -> None:
        for ends, words in (
            ([[0, 3, 8]], r"is \(1, 3\)"),
            ([0, 3, 3, 8], r"is \[0, 3, 3, 8\]; it begins with 0"),
            ([0, 5, 3, 8], "it begins with 0"),
            ([3, 8], "it begins with 0"),
            ([0], "it begins with 0"),
            ([0.0, 8.0], "integers"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                attend(rows(), torch.tensor(ends))
            with self.assertRaisesRegex(ValueError, words):
                _layout.lengths_of({"cu_seq_lens_q": torch.tensor(ends)})
        q = rows()
        with self.assertRaisesRegex(ValueError, "cu_seqlens_q is not"):
            cadre.flash_attn_varlen_func(q, q, q, None, ENDS, ROWS, ROWS)


class Recomputes(unittest.TestCase):
    def test_a_forward_in_a_backward_is_that_of_the_layer_whose_backward_is_next(self) -> None:
        job, step = _job.Job(cadre.Shape(2, 2, 8, ("causal",) * 3), None, 1), _job.Step(0, [ROWS], True, 0.0, forward=3)
        step.kept = dict.fromkeys(range(3))
        self.assertEqual(job.recomputed_layer(step, None, "here"), 2)
        with self.assertRaisesRegex(RuntimeError, "two forwards are recomputed before the backward of layer 2"):
            job.recomputed_layer(step, None, "here")
        self.assertEqual([job.recomputed_layer(step, it, "here") for it in (0, 1, 2)], [0, 1, 2])
        step.backward = 1
        del step.kept[2]
        self.assertEqual(job.recomputed_layer(step, None, "here"), 1)
        with self.assertRaisesRegex(RuntimeError, "layer 2 is recomputed, and its backward is over"):
            job.recomputed_layer(step, 2, "here")
        step.forward = 2
        with self.assertRaisesRegex(RuntimeError, "a recompute after 2 of 3 forward phases"):
            job.recomputed_layer(step, None, "here")

    def test_results_are_kept_apart_from_memory_that_others_write(self) -> None:
        q, o, lse = rows().detach(), torch.ones(2), torch.ones(2)
        kept = _kept.Kept((q, q, q), o, lse)
        o.data.fill_(7)
        first = kept.again((q, q, q), "here")
        first[0].data.fill_(7)
        self.assertEqual(kept.again((q, q, q * (1 + 1e-6)), "here")[0].tolist(), [1, 1])

    def test_a_forward_of_other_rows_in_a_backward_is_no_recompute(self) -> None:
        q, results = rows().detach(), (torch.ones(2), torch.ones(2))
        kept = _kept.Kept((q, q, q), *results)
        with self.assertRaisesRegex(RuntimeError, "here: k of a forward in the backward is not that of"):
            kept.again((q, q + 1, q), "here")
        with self.assertRaisesRegex(RuntimeError, "here: q of"):
            kept.again((q * torch.nan, q, q), "here")


class Ends(Alone):
    def test_finish_in_finally_does_not_hide_the_cause(self) -> None:
        self.join()
        with self.assertRaisesRegex(ValueError, "the loader broke"):
            try:
                cadre.begin_step([ROWS])
                raise ValueError("the loader broke")
            finally:
                cadre.finish()
        with self.assertRaisesRegex(RuntimeError, "the job has ended"):
            cadre.begin_step([ROWS])

    def test_a_script_that_exits_well_finishes_its_job(self) -> None:
        self.join(steps=1)
        with self.assertRaises(SystemExit), mock.patch.object(_job.Job, "fail") as fail:
            try:
                cadre.begin_step([ROWS])
                raise SystemExit(0)
            finally:
                cadre.finish()
        fail.assert_not_called()

    def test_a_job_that_has_steps_left_is_not_finished(self) -> None:
        self.join()
        cadre.begin_step([ROWS])
        with self.assertRaisesRegex(RuntimeError, "left after 1 of 3 steps"):
            cadre.finish()


if __name__ == "__main__":
    unittest.main()
