"""Where a resume goes on: the state of a loader that was drawn from ahead, as the script has seen it.

Each test begins with a process in which `init` was not called.
"""

import unittest
from typing import Any
from unittest import mock

import cadre
from alone import Alone
from cadre import _job
from loaders import Loader, Stream
from torchdata.stateful_dataloader import StatefulDataLoader

ROWS = 8


def layout(number: int) -> list[int]:
    return [ROWS + number]


def stateful(workers: int = 0, count: int = 6) -> StatefulDataLoader:
    return StatefulDataLoader(range(count), batch_size=1, collate_fn=lambda it: it[0], num_workers=workers)


def stops_at(step: int) -> Any:
    """The job is asked to stop before that step begins."""
    begin = _job.Job.begin

    def asked(job: _job.Job, *more: Any) -> bool:
        if job.next < step:
            return begin(job, *more)
        job.ended, job.stopped, job.running = True, True, None
        return False

    return mock.patch.object(_job.Job, "begin", asked)


class Resumes(Alone):
    def batches(self, loader, **more):
        return cadre.batches(loader, layout=layout, **more)

    def resumed(self, loader: Any, state: Any) -> list[list[int]]:
        """The first two loops of a resume."""
        with mock.patch.object(_job, "_JOB", None):
            self.join(steps=99)
            feed = self.batches(loader, accumulate=2)
            feed.load_state_dict(state)
            return [list(feed) for _ in range(2)]

    def test_a_resume_repeats_and_skips_nothing(self) -> None:
        # Workers are ahead of what was taken.
        for make, some in (
            (lambda: stateful(count=7), range(1, 8)),
            (lambda: stateful(2, count=7), (2, 3)),
            (lambda: Loader(7), range(1, 8)),
        ):
            for taken in some:
                with mock.patch.object(_job, "_JOB", None):
                    self.join(steps=4)
                    feed = self.batches(make(), accumulate=2)
                    seen = [next(feed) for _ in range(taken)]
                    state = feed.state_dict()
                with mock.patch.object(_job, "_JOB", None):
                    self.join(steps=9)
                    loader = make()
                    again = self.batches(loader, accumulate=2)
                    again.load_state_dict(state)
                    self.assertEqual(again.state_dict(), state)
                    seen += again
                    self.assertEqual(seen, list(range(7)), f"{make}: {taken}")
                    # The next epoch begins at the beginning.
                    self.assertEqual(next(self.batches(loader)), 0)

    def test_a_resume_after_a_loop_that_ended_begins_with_the_next_epoch(self) -> None:
        # The job goes on, ends with the epoch, or ends within it.
        for make, steps, left in (
            (stateful, 9, []),
            (lambda: stateful(2), 9, []),
            (stateful, 3, []),
            (lambda: Loader(6), 3, []),
            (stateful, 2, [4, 5]),
        ):
            with mock.patch.object(_job, "_JOB", None):
                self.join(steps=steps)
                feed = self.batches(make(), accumulate=2)
                self.assertEqual([*feed, *left], list(range(6)))
                state = feed.state_dict()
            with mock.patch.object(_job, "_JOB", None):
                self.join(steps=9)
                again = self.batches(make(), accumulate=2)
                again.load_state_dict(state)
                self.assertEqual([list(again) for _ in range(2)], [left or list(range(6)), list(range(6))])

    def test_a_loader_may_pack_where_it_collates(self) -> None:
        documents = [list(range(2 + it)) for it in range(9)]
        seen, state = [], None
        for _ in range(2):
            with mock.patch.object(_job, "_JOB", None):
                self.join(steps=2)
                loader = StatefulDataLoader(documents, batch_size=2, collate_fn=cadre.pack, num_workers=1)
                feed = cadre.batches(loader)
                if state:
                    feed.load_state_dict(state)
                seen += [(_job.running().lengths(), batch.input_ids.numel()) for batch in feed]
                state = feed.state_dict()
        self.assertEqual(seen, [([2, 3], 5), ([4, 5], 9), ([6, 7], 13), ([8, 9], 17)])

    def test_a_state_that_cannot_be_is_refused(self) -> None:
        self.join()
        with self.assertRaisesRegex(TypeError, "list has no state_dict; take"):
            self.batches([1, 2]).state_dict()
        with self.assertRaisesRegex(TypeError, "list has no load_state_dict"):
            self.batches([1, 2]).load_state_dict({})
        feed = self.batches(Loader(3))
        next(feed)
        with self.assertRaisesRegex(RuntimeError, "load_state_dict was called after the first batch"):
            feed.load_state_dict({"drawn": 1})
        with self.assertRaisesRegex(ValueError, "accumulate is 0"):
            self.batches([1], accumulate=0)

    def test_a_state_is_that_of_what_was_handed_out_of_an_iterator(self) -> None:
        class Stated(Stream):
            state_dict, load_state_dict = Loader.state_dict, Loader.load_state_dict

        self.join(steps=9)
        stream = Stated(9)
        feed = self.batches(stream)
        self.assertEqual([next(feed) for _ in range(3)], [0, 1, 2])
        feed = self.batches(stream)
        self.assertEqual((feed.state_dict(), stream.drawn), ({"drawn": 3}, 4))
        with self.assertRaisesRegex(RuntimeError, "load_state_dict was called after the first batch"):
            feed.load_state_dict({"drawn": 0})

    def test_a_job_that_stops_where_an_epoch_begins_resumes_there(self) -> None:
        for make in (stateful, lambda: Loader(6)):
            for step in (0, 1, 3):
                for is_one in (True, False):
                    with mock.patch.object(_job, "_JOB", None), stops_at(step):
                        self.join(steps=9)
                        loader, seen = make(), []
                        feed = self.batches(loader, accumulate=2)
                        while not cadre.stopped():
                            feed = feed if is_one else self.batches(loader, accumulate=2)
                            seen += feed
                        state = feed.state_dict()
                    left, epoch = list(range(2 * step % 6, 6)), list(range(6))
                    self.assertEqual((seen, self.resumed(make(), state)), (list(range(2 * step)), [left, epoch]))

    def test_a_state_after_a_failed_first_batch_is_that_before_it(self) -> None:
        self.join(steps=9)
        feed = cadre.batches(stateful(), lambda it: [it // 0])
        with self.assertRaises(ZeroDivisionError):
            next(feed)
        self.assertEqual(self.resumed(stateful(), feed.state_dict()), [list(range(6))] * 2)

    def test_a_further_feed_says_what_was_handed_out_of_its_loader(self) -> None:
        class Slotted:
            """No weak reference to it can be had."""

            __slots__ = ("count", "drawn")
            __init__, __iter__ = Loader.__init__, Loader.__iter__
            state_dict, load_state_dict = Loader.state_dict, Loader.load_state_dict

        self.join(steps=9)
        for make in (stateful, lambda: Slotted(6)):
            loader = make()
            next(self.batches(loader, accumulate=2))
            again = self.resumed(make(), self.batches(loader).state_dict())
            self.assertEqual(again, [list(range(1, 6)), list(range(6))])

    def test_a_loader_without_a_state_is_refused_where_it_is_asked_for(self) -> None:
        def none(_: Any) -> dict:
            raise AttributeError("no dl_state_dict")

        def of_more(_: Any, samples: int) -> dict:
            return {"samples": samples}

        def of_generators(_: Any) -> dict:
            return {"it": (it for it in ())}

        for state_dict, said in (
            (none, "AttributeError: no dl_state_dict"),
            (of_more, "TypeError: .* 1 required positional argument"),
            (of_generators, "TypeError: cannot pickle 'generator'"),
        ):
            with mock.patch.object(_job, "_JOB", None), mock.patch.object(Loader, "state_dict", state_dict):
                self.join(steps=9)
                feed = self.batches(Loader(4), accumulate=2)
                self.assertEqual([next(feed), *feed], [0, 1, 2, 3])
                with self.assertRaisesRegex(TypeError, f"Loader has no state: {said}.*; take torchdata's"):
                    feed.state_dict()

    def test_a_state_that_fails_loses_no_batch(self) -> None:
        class Flaky(Stream):
            asked = 0

            def state_dict(self) -> dict:
                self.asked += 1
                if self.asked == 3:
                    raise OSError("the disk is away")
                return {"drawn": self.drawn}

        self.join(steps=99)
        feed = self.batches(Flaky(6))
        self.assertEqual(list(feed), list(range(6)))
        self.assertEqual(feed.state_dict(), {"drawn": 6})

    def test_nothing_is_drawn_behind_the_last_step_unasked(self) -> None:
        class Stated(Stream):
            state_dict = Loader.state_dict

        class Accelerated(Loader):
            """Its `next` may draw on all ranks together."""

            end_of_dataloader = False

        for of, steps, accumulate in ((Stated, 4, 1), (Stated, 2, 2), (Loader, 4, 1), (Accelerated, 4, 1)):
            with mock.patch.object(_job, "_JOB", None):
                self.join(steps=steps)
                loader = of(9)
                feed = self.batches(loader, accumulate=accumulate)
                self.assertEqual((list(feed), loader.drawn), ([0, 1, 2, 3], 4))
                # An iterator has no epoch behind this one.
                self.assertEqual((feed.state_dict(), loader.drawn), ({"drawn": 4}, 4 + (of is Loader)))


if __name__ == "__main__":
    unittest.main()
