"""What `cadre.batches` makes of a loader: updates, their order, epochs, and where a resume goes on.

Each test begins with a process in which `init` was not called.
"""

import gc
import itertools
import tempfile
import unittest
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import cadre
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from alone import Alone
from cadre import _epochs, _job, _layout, _mistakes, _step, _turns
from loaders import Again, Loader, Resets, Rewinds, Stream
from torch.utils.data import DataLoader

ROWS = 8


def layout(number: int) -> list[int]:
    return [ROWS + number]


class Orders(Alone):
    def test_turns_are_written_as_a_number_or_an_order(self) -> None:
        for turns, count, told in (
            (None, 2, "F0 B0 F1 B1"),
            (1, 2, "F0 B0 F1 B1"),
            (2, 3, "F0 F1 B0 F2 B1 B2"),
            (9, 2, "F0 F1 B0 B1"),
            ("F0 F1 B1 B0", 2, "F0 F1 B1 B0"),
            ("F0+1 B1+0 F2 B2", 3, "F0+1 B1+0 F2 B2"),
            (lambda count: f"F0 F1 B{count - 1} B0", 2, "F0 F1 B1 B0"),
        ):
            self.assertEqual(_turns.in_words(_turns.order_of(turns, count)), told)
        for turns, words in (
            (0, "turns is 0; 1 micro-batch or more"),
            ("F0 b0 F1 B1", "'b0' is no turn"),
            ("F0 B0", "the step has 2 micro-batches; each goes forward once"),
            ("F1 B1 F0 B0", "in their order"),
            ("F0 F1 B0 B0", "and backward once"),
            ("F0 B1 F1 B0", "B1 comes before F1"),
            ("F1+0 B0+1", "in their order"),
            ("F0+ B0 F1 B1", "'F0\\+' is no turn"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                _turns.order_of(turns, 2)

    def test_batches_go_forward_before_the_backward_of_the_one_before(self) -> None:
        self.join(steps=1)
        waiting, seen = [], []
        for batch in (feed := cadre.batches(Loader(3), lambda it: [ROWS + it], accumulate=3, turns=2)):
            waiting.append(batch)
            seen.append(f"F{batch}")
            while len(waiting) > (not feed.is_last):
                seen.append(f"B{waiting.pop(0)}")
            order = _turns.in_words(_job.running().order)
        self.assertEqual(" ".join(seen), order)


class Loaders(Alone):
    def batches(self, loader, **more):
        return cadre.batches(loader, layout=layout, **more)

    def test_an_update_is_held_back_and_the_last_of_an_epoch_may_have_fewer_batches(self) -> None:
        self.join(steps=4)
        loader, seen = Loader(5), []
        for _ in range(3):
            for batch in (feed := self.batches(loader, accumulate=2)):
                step = _job.running()
                seen.append((step.number, step.at, batch, step.lengths(), feed.is_last, loader.drawn))
        self.assertEqual(
            seen,
            [
                (0, 0, 0, [8], False, 4),
                (0, 1, 1, [9], True, 4),
                (1, 0, 2, [10], False, 0),
                (1, 1, 3, [11], True, 0),
                (2, 0, 4, [12], True, 0),
                # The second epoch; the job has no further step.
                (3, 0, 0, [8], False, 2),
                (3, 1, 1, [9], True, 2),
            ],
        )
        self.assertTrue(_job.current().ended)

    def test_an_exception_before_a_step_begins_loses_no_batch(self) -> None:
        class Breaks(Stream):
            """Each batch fails once before it comes."""

            broken = -1

            def __next__(self) -> int:
                if self.broken < self.drawn < self.count:
                    self.broken = self.drawn
                    raise OSError("the disk is away")
                return super().__next__()

        def refused(layouts: Any, *more: Any) -> bool:
            """As a step is whose former one lacks a backward; once a step."""
            job = _job.current()
            if job.next not in said:
                said.append(job.next)
                raise RuntimeError("0 backward phases were called")
            return begin(job, layouts, *more)

        self.join(steps=4)
        seen, said, begin = [], [], _job.Job.begin
        feed = self.batches(Breaks(5), accumulate=2)
        with mock.patch.object(_job.current(), "begin", refused):
            for _ in range(50):
                try:
                    seen.append((next(feed), _job.running().number, feed.micro_batches))
                except (OSError, RuntimeError):
                    continue
                except StopIteration:
                    break
        self.assertEqual(seen, [(0, 0, 2), (1, 0, 2), (2, 1, 2), (3, 1, 2), (4, 2, 1)])
        self.assertEqual(said, [0, 1, 2])

    def test_one_object_serves_epochs_and_says_how_many_batches_an_update_has(self) -> None:
        self.join(steps=4)
        feed = self.batches(Loader(3), accumulate=2)
        seen = [[(batch, feed.micro_batches) for batch in feed] for _ in range(2)]
        self.assertEqual(seen, [[(0, 2), (1, 2), (2, 1)]] * 2)

    def test_a_layout_may_be_a_tensor(self) -> None:
        self.join(steps=1)
        feed = cadre.batches([0, 1], layout=lambda _: torch.tensor([3]), accumulate=2)
        next(feed)
        self.assertEqual(_job.running().lengths(), [3])
        next(feed)
        self.assertEqual(_job.running().at, 1)

    def test_a_loader_that_begins_again_after_its_end_mixes_no_epochs(self) -> None:
        self.join(steps=6)
        loader = Resets(5)
        self.assertEqual([list(self.batches(loader, accumulate=2)) for _ in range(2)], [list(range(5))] * 2)

    def test_documents_of_a_batch_are_asked_for_once(self) -> None:
        self.join(steps=4)
        batches = [{"lengths": [ROWS + at]} for at in range(4)]
        steps = [_job.running().lengths() for _ in cadre.batches(batches, layout=lambda it: it.pop("lengths"))]
        self.assertEqual(steps, [[8], [9], [10], [11]])

    def test_a_loader_that_ends_after_an_exception_ends_no_epoch_in_silence(self) -> None:
        def documents():
            yield from range(3)
            raise OSError("the disk is away")

        self.join(steps=9)
        seen, said = [], []
        feed = self.batches(map(int, documents()))
        for _ in range(9):
            try:
                seen.append(next(feed))
            except StopIteration:
                break
            except (OSError, RuntimeError) as error:
                said.append(error)
        self.assertEqual(seen, [0, 1, 2])
        self.assertEqual(str(said[0]), "the disk is away")
        self.assertRegex(str(said[1]), "map ended at the call after it raised OSError: the disk is away.*be missing")
        # Another attempt may find the disk.
        self.assertFalse(_mistakes.is_mistake(said[1]))
        self.assertEqual(len(said), 2)

    def test_a_generator_has_one_epoch(self) -> None:
        self.join(steps=9)
        generator = (it for it in range(3))
        feed = self.batches(generator)
        self.assertEqual(list(feed), [0, 1, 2])
        for again in (feed, self.batches(generator)):
            with self.assertRaisesRegex(ValueError, "a generator that has ended; .* one epoch: give a loader that"):
                next(again)

    def test_rows_without_position_ids_are_documents(self) -> None:
        batch = {"input_ids": torch.zeros(3, 7)}
        self.assertEqual(_layout.lengths_of(batch), [7, 7, 7])
        with self.assertRaisesRegex(TypeError, "no cu_seq_lens_q"):
            _layout.lengths_of(batch | {"position_ids": torch.zeros(3, 7)})


class Accelerated(Alone):
    """Accelerate asks the loader that its script loops over whether the batch is the last of an epoch."""

    def setUp(self) -> None:
        super().setUp()
        self.reset()
        self.addCleanup(self.reset)

    @staticmethod
    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    def trained(self, count: int, make: Callable, *, is_left: bool = False) -> list[tuple[float, bool, float]]:
        """Batches of two epochs, whether an update ends with each, and the weight after it."""
        self.reset()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(1)
        model = torch.nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.Adam(model.parameters(), lr=0.1), DataLoader([torch.ones(1) * it for it in range(count)])
        )
        told, feed = [], make(loader)
        for _ in range(2):
            for batch in feed if isinstance(feed, cadre.Batches) else make(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().sum())
                    optimizer.step()
                    optimizer.zero_grad()
                told.append((batch.item(), accelerator.sync_gradients, model.weight.item()))
            self.assertFalse(accelerator.gradient_state.in_dataloader and not is_left)
        return told

    def test_its_updates_end_where_they_do_without_cadre(self) -> None:
        for count in (1, 4, 5, 8):
            expected = self.trained(count, iter)
            for accumulate, hide, more in itertools.product((1, 2), (lambda it: it, Again), (99, 0)):
                with mock.patch.object(_job, "_JOB", None):
                    # Also where the job's last step is the last one of an epoch, behind which nothing is drawn.
                    self.join(steps=2 * -(-count // accumulate) + more)
                    make = lambda it: cadre.batches(hide(it), lambda _: [ROWS], accumulate=accumulate)  # noqa: B023, E731
                    told = self.trained(count, make, is_left=not more)
                self.assertEqual(told, expected, (count, accumulate, more))

    def test_a_registered_feed_is_resumed_where_the_script_was(self) -> None:
        seen = []
        with tempfile.TemporaryDirectory() as folder:
            for resumes in (False, True):
                self.reset()
                with mock.patch.object(_job, "_JOB", None):
                    self.join(steps=99)
                    kind = DataLoaderConfiguration(use_stateful_dataloader=True)
                    accelerator = Accelerator(cpu=True, dataloader_config=kind)
                    feed = cadre.batches(accelerator.prepare(DataLoader(range(9))), lambda _: [ROWS], accumulate=2)
                    accelerator.register_for_checkpointing(feed)
                    if resumes:
                        accelerator.load_state(folder)
                    seen += [it.item() for it in itertools.islice(feed, 99 if resumes else 3)]
                    accelerator.save_state(folder)
        self.assertEqual(seen, list(range(9)))


class Left(Alone):
    """Loops that are left before their loader ends, in a job that compares each step with what was announced."""

    def setUp(self) -> None:
        super().setUp()
        self.join(steps=99)
        session = mock.Mock(**{"begin.return_value": "step"})
        for it in (
            mock.patch.object(_job.current(), "session", session),
            # Nothing calls attention.
            mock.patch.object(_step.Step, "unfinished", return_value=None),
            mock.patch.object(_step.Step, "due", return_value=None),
        ):
            it.start()
            self.addCleanup(it.stop)

    def some(self, feed: cadre.Batches, count: int = 3) -> list[int]:
        """Batches of a loop that is left."""
        seen = []
        for batch in feed:
            seen.append(batch)
            self.assertEqual(_job.running().lengths(), layout(batch))
            if len(seen) == count:
                break
        return seen

    def test_a_further_loop_goes_on_with_what_was_drawn_ahead(self) -> None:
        for make in (lambda: iter(range(20)), lambda: (it for it in range(20)), lambda: Stream(20)):
            with mock.patch.object(_job.current(), "announced", None):
                stream, seen = make(), []
                # The second loop is left within an update.
                for accumulate in (2, 2, 1, 3):
                    seen.append(self.some(cadre.batches(stream, layout, accumulate=accumulate), 4 - len(seen) % 2))
                self.assertEqual(seen, [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11, 12, 13]])
                list(cadre.batches(stream, layout))

    def test_one_feed_serves_all_loops(self) -> None:
        feed = cadre.batches(list(range(7)), layout)
        self.assertEqual([self.some(feed) for _ in range(3)], [[0, 1, 2], [3, 4, 5], [6]])
        self.assertEqual(self.some(feed), [0, 1, 2])

    def test_a_loop_of_a_part_of_a_loader_draws_no_more(self) -> None:
        stream = Stream(9)
        loops = [list(cadre.batches(itertools.islice(stream, 4), layout)) for _ in range(2)]
        self.assertEqual((loops, next(stream)), ([[0, 1, 2, 3], [4, 5, 6, 7]], 8))

    def test_a_loader_that_begins_anew_is_compared_with_what_was_announced(self) -> None:
        alike = [ROWS] * 9
        for _ in range(2):
            self.assertEqual(next(cadre.batches(alike, lambda it: [it])), ROWS)
        _job.current().announced = None
        self.some(cadre.batches(range(100, 109), layout))
        with self.assertRaisesRegex(ValueError, "was announced with .* loop over the same `batches` again"):
            self.some(cadre.batches(range(100, 109), layout))

    def test_what_was_drawn_ahead_is_never_lost_in_silence(self) -> None:
        def alike(loader: Any) -> cadre.Batches:
            return cadre.batches(loader, lambda _: [ROWS])

        # Both go on.
        one, other = alike(Stream(9)), alike(Stream(9))
        self.assertEqual([next(it) for it in (one, other) * 2], [0, 0, 1, 1])
        del one
        words = "1 batches were drawn ahead from a Stream whose loop was left, and a loop over another .*; keep what"
        with self.assertRaisesRegex(ValueError, words):
            next(other)

    def test_what_was_drawn_ahead_of_loops_that_were_left_does_not_stay_in_memory(self) -> None:
        class Prefetches:
            def __init__(self) -> None:
                self.numbers = map(torch.tensor, range(ROWS))

            def __iter__(self):
                self.began = True
                return self

            def __next__(self) -> torch.Tensor:
                alive.add(it := next(self.numbers))
                return it

        alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        for _ in range(3):
            self.assertEqual(next(cadre.batches(Prefetches(), lambda _: [ROWS])), 0)
        gc.collect()
        self.assertEqual(len(alive), 0)

    def test_an_epoch_that_has_ended_does_not_stay_in_memory(self) -> None:
        feed = cadre.batches(Resets(3), layout)
        for _ in range(5):
            self.assertEqual(list(feed), [0, 1, 2])
        self.assertLessEqual(len(_job.current().loaders._kept), 1)

    def test_an_iterator_that_may_begin_anew_is_refused_after_a_loop_that_was_left(self) -> None:
        loader = Rewinds(9)
        self.assertEqual(next(cadre.batches(loader, lambda _: [ROWS])), 0)
        with self.assertRaisesRegex(ValueError, "1 batches were drawn ahead from a Rewinds whose loop was left"):
            next(cadre.batches(loader, lambda _: [ROWS]))


class Epochs(Alone):
    """Ranks that share a store."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        self.ranks = [_epochs.Epochs(it, 2) for it in range(2)]

    def steps(self, rank: int, *are_first: bool) -> None:
        for number, it in enumerate(are_first):
            self.ranks[rank].step(number, is_first=it)

    def test_epochs_that_begin_together_are_let_be(self) -> None:
        for step in range(5):
            for it in self.ranks:
                it.step(step, is_first=step % 2 == 0)

    def test_a_loader_that_goes_on_when_that_of_another_rank_has_ended_is_refused(self) -> None:
        self.steps(0, True, False)
        self.steps(1, True, False)
        self.ranks[0].step(2, is_first=True)
        said = "epoch 1 begins with step 2 on rank 0, and after step 2, or later on rank 1: loaders differ in length"
        with self.assertRaisesRegex(ValueError, said):
            self.ranks[1].step(2, is_first=False)

    def test_batches_compare_the_epochs_of_their_loader(self) -> None:
        self.join(steps=9)
        _job.current().epochs, feed = self.ranks[1], cadre.batches(Loader(5), layout=lambda _: [ROWS])
        self.steps(0, True)
        self.assertEqual(next(feed), 0)
        self.ranks[0].step(1, is_first=True)
        with self.assertRaisesRegex(ValueError, "epoch 1 begins with step 1 on rank 0, and after step 1, or later on"):
            next(feed)

    def test_a_loader_that_ends_later_is_refused(self) -> None:
        self.steps(1, True, False)
        self.steps(0, True)
        self.ranks[0].step(1, is_first=True)
        with self.assertRaisesRegex(ValueError, "epoch 1 begins with step 1 on rank 0, and with step 2 on rank 1"):
            self.ranks[1].step(2, is_first=True)


if __name__ == "__main__":
    unittest.main()
