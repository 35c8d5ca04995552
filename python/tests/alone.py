"""A process that no job has started, or that takes itself for a pool: what tests of one rank begin with."""

import contextlib
import io
import unittest
from unittest import mock

import cadre
from cadre import _here, _job, _layout
from torch import Tensor


class Itself:
    """A session whose phases this process computes when they are submitted. It refuses nothing."""

    wire, wire_is_open, gpu, rank, ranks = "float32", True, None, 0, 1

    def __init__(self, shape: cadre.Shape) -> None:
        self.shape, self.lengths = shape, []

    def announce(self, _: int, micro_batches: list, *__: object) -> None:
        self.lengths = [[end - start for _, start, end in stretches] for _, stretches in micro_batches]

    def begin(self, _: int) -> str:
        return "step"

    def done(self, *_: object, **__: object) -> None:
        pass

    leave = done

    def submit(self, phase: tuple[int, int], qkv: tuple, gradients: tuple = (), **_: object) -> tuple[Tensor, ...]:
        at, layer = phase
        compute = _here.backward if gradients else _here.forward
        return compute(self.shape.kinds[layer], self.lengths[at], *qkv, *gradients)

    def wait(self, ticket: tuple[Tensor, ...], *results: Tensor, **_: object) -> None:
        for one, other in zip(results, ticket, strict=True):
            one.copy_(other)


class Alone(unittest.TestCase):
    """Before each test nothing of Cadre was called in this process."""

    def setUp(self) -> None:
        for it in (
            mock.patch.object(_job, "_JOB", None),
            mock.patch.dict(_layout._PARTS, clear=True),
            mock.patch.object(_job.os, "register_at_fork"),
        ):
            it.start()
            self.addCleanup(it.stop)

    def join(self, steps: int = 3) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            cadre.init(cadre.Shape(2, 2, 8, ("causal",)), steps=steps)

    def join_itself(self, layers: int = 1, *, frozen: int = 0) -> None:
        """Joins as the only rank of a job whose pool is this process."""
        shape = cadre.Shape(2, 2, 8, ("causal",) * layers, frozen)
        _job._JOB = _job.Job(shape, Itself(shape), 3)
