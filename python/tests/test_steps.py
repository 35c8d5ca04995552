"""Steps of a process that no job has started: whose documents a call takes, recomputes, and what is refused.

Each test begins with a process in which `init` was not called.
"""

import contextlib
import io
import os
import unittest
from types import SimpleNamespace
from unittest import mock

import cadre
import numpy
import torch
from alone import Alone
from cadre import _check, _job, _kept, _layout, _mistakes, _step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS = 8
ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)
WINDOW = cadre.Kind("window:8", scale=0.4)


def attend(q: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    return cadre.flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, ROWS, ROWS, causal=True)


def rows() -> Tensor:
    return torch.randn(ROWS, 2, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


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

    def test_more_forwards_than_layers_do_not_take_the_documents_of_the_step(self) -> None:
        self.join()
        cadre.begin_step([[3, 5], [ROWS]])
        q, again = rows(), rows()
        with self.assertRaisesRegex(ValueError, "its documents have 8 rows and q 7; give the batch"):
            attend(q[:7])
        # A recompute is of the same forward.
        loss = checkpoint(attend, q, use_reentrant=False).square().sum()
        remedy = "micro-batch 0: all 1 forward calls .*pass cu_seqlens .*under cadre.local"
        with torch.no_grad(), self.assertRaisesRegex(RuntimeError, remedy):
            attend(again)
        # What says its documents is no call of the step's, and has these.
        whole = attend(again, torch.tensor([0, ROWS]))
        loss.backward()
        attend(again, ENDS).square().sum().backward()
        self.assertTrue(torch.equal(q.grad, again.grad))
        cadre.next_micro_batch()
        self.assertTrue(torch.equal(attend(q), whole))
        with self.assertRaisesRegex(RuntimeError, "micro-batch 1: all 1 forward"):
            attend(q)
        cadre.begin_step([3, 5])
        attend(q)

    def test_an_evaluation_that_takes_the_documents_of_a_step_is_told_with_the_remedy(self) -> None:
        self.join()
        cadre.begin_step([3, 5])
        # Of other rows at once, of as many by the training's own forward.
        with torch.no_grad(), self.assertRaisesRegex(ValueError, "documents have 8 rows and q 7; .*under cadre.local"):
            attend(rows()[:7])
        with torch.no_grad():
            attend(rows())
        with self.assertRaisesRegex(RuntimeError, "all 1 forward calls have taken .* evaluate under cadre.local"):
            attend(rows())
        # As it should be.
        cadre.begin_step([3, 5])
        with torch.no_grad(), cadre.local():
            attend(rows()[:7], torch.tensor([0, 7]))
        attend(rows()).sum().backward()

    def test_tensors_are_layouts_and_their_numbers_are_lengths(self) -> None:
        self.join()
        for layouts, micro_batches in (
            ([torch.tensor([3]), torch.tensor([5])], [[3], [5]]),
            ([numpy.array([3, 5]), [ROWS], range(4, 5)], [[3, 5], [ROWS], [4]]),
            (torch.tensor([3, 5]), [[3, 5]]),
            (list(torch.tensor([3, 5])), [[3, 5]]),
        ):
            found = _job.current().stretches(layouts)
            self.assertEqual([[it.rows for it in of] for of in found], micro_batches)

    def test_micro_batches_have_documents_of_their_own(self) -> None:
        self.join()
        cadre.begin_step([[3, 5], [ROWS]])
        q = rows()
        first = attend(q).square().sum()
        cadre.next_micro_batch()
        self.assertTrue(torch.equal(attend(q), attend(q, torch.tensor([0, ROWS]))))
        expected = torch.autograd.grad(attend(q, ENDS).square().sum(), q)[0]
        self.assertTrue(torch.equal(torch.autograd.grad(first, q)[0], expected))
        with self.assertRaisesRegex(RuntimeError, "micro-batch 1: it is the last"):
            cadre.next_micro_batch()
        with self.assertRaisesRegex(ValueError, r"layout \[3, 0\]; give documents"):
            cadre.begin_step([[3, 0]])

    def test_a_micro_batch_may_have_no_documents(self) -> None:
        self.join()
        cadre.begin_step([[ROWS], []])
        attend(rows())
        cadre.next_micro_batch()
        for ends in (None, torch.tensor([0])):
            q = rows()[:0].detach().requires_grad_()
            o = attend(q, ends)
            o.sum().backward()
            self.assertEqual((o.shape, q.grad.shape), (q.shape, q.shape))
        # As a loader gives it.
        for batch in ({"cu_seq_lens_q": [0]}, {"input_ids": torch.zeros(1, 0)}, {"input_ids": torch.zeros(0, 5)}):
            self.assertEqual(_layout.lengths_of(batch), [])

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
            (
                [0, 3, 3, 8],
                r"is \[0, 3, 3, 8\]; it begins with 0 .*; take documents of 0 rows out, as torch.unique_cons",
            ),
            ([0, 5, 3, 8], "each number is higher than the one before$"),
            ([3, 8], "it begins with 0"),
            ([0.0, 8.0], "integers"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                attend(rows(), torch.tensor(ends))
            with self.assertRaisesRegex(ValueError, words):
                _layout.lengths_of({"cu_seq_lens_q": torch.tensor(ends)})
        q = rows()
        # There are rows, and no documents.
        with self.assertRaisesRegex(ValueError, "it begins with 0"):
            attend(q, torch.tensor([0]))
        with self.assertRaisesRegex(ValueError, "cu_seqlens_q is not"):
            cadre.flash_attn_varlen_func(q, q, q, None, ENDS, ROWS, ROWS)


class Kinds(unittest.TestCase):
    def test_a_window_that_is_longer_than_its_documents_is_causal(self) -> None:
        def call(rows: int, kind: str, announced: cadre.Kind = WINDOW) -> None:
            layout = [cadre.Stretch(0, rows, 0, 4)]
            step = _step.Step((0, 0), cadre.Shape(2, 2, 8, (announced,)), [layout], pooled=True)
            self.assertEqual(step.forward_phase(kind, None, [(4, 2, 8)] * 3, None), ((0, 0), None))

        for rows in (4, 8):
            call(rows, "causal scale 0.4")
            call(rows, "window:9 scale 0.4", cadre.Kind(scale=0.4))
        # A document that goes on in another rank is longer than its rows here.
        for rows, kind in ((9, "causal scale 0.4"), (4, "causal"), (4, "full scale 0.4"), (9, "window:9 scale 0.4")):
            with self.assertRaisesRegex(ValueError, f"layer 0 is window:8 scale 0.4 and the call is {kind}"):
                call(rows, kind)


class Recomputes(Alone):
    def test_a_forward_in_a_backward_is_that_of_the_layer_whose_backward_is_next(self) -> None:
        shape, layout = cadre.Shape(2, 2, 8, ("causal",) * 3), [cadre.Stretch(0, ROWS, 0, ROWS)]
        step = _step.Step((0, 0), shape, [layout], pooled=True)
        step.forward = [3]
        step.kept = dict.fromkeys((0, it) for it in range(3))
        self.assertEqual(step.recomputed_layer(0, None), 2)
        with self.assertRaisesRegex(RuntimeError, "two forwards are recomputed before the backward of layer 2"):
            step.recomputed_layer(0, None)
        self.assertEqual([step.recomputed_layer(0, it) for it in (0, 1, 2)], [0, 1, 2])
        step.backward = [1]
        del step.kept[0, 2]
        self.assertEqual(step.recomputed_layer(0, None), 1)
        with self.assertRaisesRegex(RuntimeError, "layer 2 is recomputed, and its backward is over"):
            step.recomputed_layer(0, 2)
        step.forward = [2]
        with self.assertRaisesRegex(RuntimeError, "a recompute after 2 of 3 forward phases"):
            step.recomputed_layer(0, None)

    def test_frozen_layers_are_recomputed_one_after_the_other_without_a_backward_between(self) -> None:
        shape, layout = cadre.Shape(2, 2, 8, ("causal",) * 4, frozen=3), [cadre.Stretch(0, ROWS, 0, ROWS)]
        step = _step.Step((0, 0), shape, [layout], pooled=True)
        step.forward = [4]
        step.kept = dict.fromkeys((0, it) for it in range(4))
        self.assertEqual(step.recomputed_layer(0, None), 3)
        step.backward = [1]
        del step.kept[0, 3]
        self.assertEqual([step.recomputed_layer(0, None) for _ in range(3)], [2, 1, 0])
        with self.assertRaisesRegex(RuntimeError, "layer 0 is recomputed, and its backward is over"):
            step.recomputed_layer(0, None)

    def test_several_layers_in_one_checkpoint_are_told_to_name_themselves(self) -> None:
        def layers(x: Tensor, named: bool, alike: bool) -> Tensor:
            for at in range(2):
                layer = torch.tensor(at) if named else None
                q = x if alike else x * (1 + at)
                o = cadre.flash_attn_varlen_func(q, q, q, None, None, ROWS, ROWS, causal=True, layer=layer)
                x = x if alike else o
            return o

        for named, alike, refused in (
            (True, False, None),
            (False, False, "q of a forward in the backward is not that of .*pass layer="),
            # Whose rows are the same: the second one is refused then.
            (False, True, "two forwards are recomputed before the backward of layer 1.* pass layer="),
        ):
            self.join_itself(layers=2)
            cadre.begin_step([3, 5])
            loss = checkpoint(layers, rows(), named, alike, use_reentrant=False).sum()
            if refused is None:
                loss.backward()
                self.assertTrue(cadre.begin_step([1]))
                continue
            with self.assertRaisesRegex(RuntimeError, f"^rank 0, step 0.*{refused}"):
                loss.backward()

    def test_what_was_called_outside_of_a_checkpoint_is_not_kept(self) -> None:
        step = _step.Step((0, 0), cadre.Shape(2, 2, 8, ("causal",)), [[cadre.Stretch(0, 8, 0, 8)]], pooled=True)
        step.forward = [1]
        with self.assertRaisesRegex(RuntimeError, "layer 0 is called in a backward, and its first call was inside of"):
            step.recomputed_layer(0, None)

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
        bad = q * torch.nan
        with self.assertRaisesRegex(RuntimeError, "here: q of"):
            kept.again((bad, q, q), "here")
        # Which is passed on, and the same again.
        _kept.Kept((bad, q, q), *results).again((bad, q, q), "here")
        with self.assertRaisesRegex(RuntimeError, "here: k of"):
            _kept.Kept((bad, q, q), *results).again((bad, q + 1, q), "here")

    def test_samples_are_of_all_heads_and_dims(self) -> None:
        q = torch.zeros(2048, 4, 32)
        kept = _kept.Kept((q, q, q), torch.ones(2), torch.ones(2))
        for place in ((slice(None), 1), (slice(None), slice(None), 3), (slice(1, None, 8),)):
            other = q.clone()
            other[place] = 1
            with self.assertRaisesRegex(RuntimeError, "here: v of"):
                kept.again((q, q, other), "here")


class Ends(Alone):
    def test_numbers_that_cannot_be_are_refused_where_they_are_given(self) -> None:
        for more in ({"seed": -1}, {"threads": -1}, {"seed": 1 << 64}):
            name, value = next(iter(more.items()))
            with self.assertRaisesRegex(ValueError, f"init: {name} is {value}; give 0 or more"):
                cadre.init(cadre.Shape(2, 2, 8, ("causal",)), steps=1, **more)
        self.join()
        for layout, words in (
            ([3.5, 2], "layout .*; give whole numbers, or stretches"),
            ([cadre.Stretch(1 << 32, 3, 0, 3)], "below 2.32, and not negative"),
            ([cadre.Stretch(-1, 3, 0, 3)], "below 2.32, and not negative"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                cadre.begin_step(layout)
        cadre.begin_step([ROWS])
        # The former step goes on.
        for refused in ({"layouts": [0]}, {"layouts": [ROWS], "turns": "F0 F1"}):
            with mock.patch.object(_step.Step, "unfinished", return_value=None), self.assertRaises(ValueError):
                cadre.begin_step(**refused)
            self.assertEqual(_job.running().number, 0)
        with self.assertRaisesRegex(ValueError, "accumulate is 1.5"):
            cadre.batches([1], accumulate=1.5)

    def test_a_process_joins_once_and_says_once_that_no_job_started_it(self) -> None:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            cadre.init(cadre.Shape(2, 2, 8, ("causal",)), steps=2)
            with self.assertRaisesRegex(RuntimeError, "init was called before; a process is one rank of one job"):
                cadre.init(cadre.Shape(2, 2, 8, ("causal",)), steps=2)
            for _ in range(2):
                cadre.begin_step([ROWS])
                attend(rows())
            cadre.finish()
        self.assertEqual(said.getvalue(), "cadre: no job has started this process; core attention is computed here\n")

    def test_heads_that_tensor_parallel_divides_are_refused_when_the_job_is_joined(self) -> None:
        model = torch.nn.Linear(1, 1)
        model.config = SimpleNamespace(num_attention_heads=2, num_hidden_layers=1, hidden_size=16)
        cadre.Shape.of(model)
        model._tp_size = 2
        with self.assertRaisesRegex(NotImplementedError, "init: tensor parallel .*tp_size is 2; set it to 1"):
            cadre.init(model, steps=1)

    def test_steps_are_a_whole_number(self) -> None:
        for steps in (-1, 2.5):
            with self.assertRaisesRegex(ValueError, f"steps is {steps}; a job has 1 or more"):
                self.join(steps=steps)

    def test_a_mistake_names_the_rank_that_a_job_has_given_and_no_other(self) -> None:
        pod = {"CADRE_CONTROL": "unix:/nowhere", "CADRE_INDEX": "5", "RANK": "3"}
        for job, begin in (({"RANK": "3"}, ""), (pod | {"CADRE_INDEX": None}, "rank 3: "), (pod, "rank 5: ")):
            with mock.patch.dict(os.environ, {name: it for name, it in job.items() if it is not None}):
                with self.assertRaisesRegex(ValueError, f"^{begin}init: steps is -1"):
                    self.join(steps=-1)
                with self.assertRaisesRegex(TypeError, f"^{begin}k is a list; give a tensor"):
                    cadre.flash_attn_varlen_func(rows(), [], [], ENDS, ENDS, ROWS, ROWS)
                # None of the package's.
                with self.assertRaisesRegex(ValueError, "^invalid literal"):
                    _mistakes.names_rank(int)("x")
        self.join()
        with self.assertRaisesRegex(ValueError, "^q is "):
            attend(rows()[0])

    def test_a_launcher_that_restarts_ranks_by_itself_is_refused(self) -> None:
        restarts = mock.patch.dict(os.environ, TORCHELASTIC_MAX_RESTARTS="3")
        with restarts, self.assertRaisesRegex(ValueError, "torchrun restarts ranks by itself, 3 times"):
            self.join()

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

    def test_without_steps_there_is_none(self) -> None:
        self.join(steps=0)
        self.assertEqual(list(cadre.batches([[3]], lambda batch: batch)), [])
        self.assertFalse(cadre.begin_step([3]))
        self.assertFalse(cadre.stopped())
        cadre.finish()

    def test_a_check_refuses_a_rank_without_documents(self) -> None:
        feed = _check.Feed(mock.Mock(updates=[]))
        with self.assertRaisesRegex(ValueError, "a batch of this rank has no documents"):
            feed.begin(SimpleNamespace(), list, lambda: [[]])

    def test_a_script_that_exits_well_finishes_its_job(self) -> None:
        self.join(steps=1)
        with self.assertRaises(SystemExit), mock.patch.object(_job.Job, "fail") as fail:
            try:
                cadre.begin_step([ROWS])
                raise SystemExit(0)
            finally:
                cadre.finish()
        fail.assert_not_called()

    def test_an_exception_that_was_handled_ends_no_job(self) -> None:
        self.join(steps=1)
        with mock.patch.object(_job.Job, "fail") as fail:
            try:
                raise ValueError("no checkpoint yet")
            except ValueError:
                cadre.begin_step([ROWS])
                cadre.finish()
        fail.assert_not_called()

    def test_a_job_that_has_steps_left_is_not_finished(self) -> None:
        self.join()
        cadre.begin_step([ROWS])
        with self.assertRaisesRegex(RuntimeError, "left after 1 of 3 steps"):
            cadre.finish()


if __name__ == "__main__":
    unittest.main()
