"""A process that no job has started: what tests of one rank begin with."""

import contextlib
import io
import unittest
from unittest import mock

import cadre
from cadre import _job, _layout


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
