"""What a script tells the job of a step, what is refused of it, and steps that do not end well.

Each test begins with a process in which `init` was not called.
"""

import unittest
from unittest import mock

import cadre
import numpy
import torch
from alone import Alone
from cadre import _job, _step

ROWS = 8


class Telling(Alone):
    def test_what_is_no_number_is_refused_by_its_name(self) -> None:
        self.join()
        cadre.begin_step([ROWS])
        for told, words in (
            ({"tokens": -1}, "tokens is -1; give the tokens of all ranks: a whole number from 0 to 2.64 - 1"),
            ({"tokens": 2.5}, "tokens is 2.5"),
            ({"tokens": 2**64}, "tokens is 18446744073709551616"),
            ({"tokens": float("nan")}, "tokens is nan"),
            ({"tokens": torch.zeros(2)}, "tokens is tensor"),
            ({"tokens": [3]}, r"tokens is \[3\]"),
            ({"loss": torch.zeros(2)}, r"loss is tensor\(.*, a Tensor; give one number"),
            ({"loss": None}, "loss is None, a NoneType"),
            ({"loss": "0.5"}, "loss is '0.5', a str; give one number"),
            ({"loss": True}, "loss is True, a bool; give one number"),
            ({"tokens": True}, "tokens is True; give the tokens of all ranks"),
            ({"tokens": torch.tensor(True)}, "tokens is True"),
            ({"gradient_norm": "large"}, "gradient_norm is 'large', a str"),
            ({"learning_rate": [0.1]}, r"learning_rate is \[0.1\], a list; give one number, such as .*get_last_lr"),
            ({"learning_rate": 1j}, "learning_rate is 1j, a complex"),
            ({"validation_loss": [0.1]}, "validation_loss is"),
        ):
            with self.assertRaisesRegex(ValueError, f"^report: {words}"):
                cadre.report(**{"loss": 1.0, **told})
        self.assertEqual((_job.running().loss, _job.running().tokens), (0.0, None))
        cadre.report(loss=torch.ones(1), tokens=torch.tensor(7), gradient_norm=numpy.float32(2), learning_rate=1)
        step = _job.running()
        self.assertEqual((step.loss, step.tokens, step.gradient_norm, step.learning_rate), (1.0, 7, 2.0, 1.0))
        for steps in (-1, 2.5, 2**64, None, True):
            with self.assertRaisesRegex(ValueError, f"saved: steps is {steps}; give"):
                cadre.saved(steps)
        for seconds in (-1.0, float("nan"), float("inf")):
            with self.assertRaisesRegex(ValueError, f"busy: seconds is {seconds}"):
                cadre.busy(seconds)

    def test_a_step_that_the_session_does_not_end_stays_the_one_that_runs(self) -> None:
        self.join()
        cadre.begin_step([ROWS])
        session = mock.Mock(**{"done.side_effect": TypeError("must be real number")})
        with mock.patch.object(_job.current(), "session", session), self.assertRaisesRegex(TypeError, "real number"):
            cadre.begin_step([ROWS])
        self.assertEqual(_job.running().number, 0)
        cadre.begin_step([ROWS])
        self.assertEqual(_job.running().number, 1)


class Tries(unittest.TestCase):
    def test_a_step_is_not_tried_again_after_an_exception_of_the_scripts(self) -> None:
        shape, rows = cadre.Shape(2, 2, 8, ("causal",) * 2), [(ROWS, 2, 8)] * 3
        for named in (True, False):
            step = _step.Step((0, 0), shape, [[cadre.Stretch(0, ROWS, 0, ROWS)]], pooled=True)

            def forward(layer: int, step: _step.Step = step, named: bool = named) -> None:
                (at, own), _ = step.forward_phase("causal", None, rows, layer if named else None)
                step.forward[at] = own + 1

            forward(0)
            # Memory was short, say. Without names the first layer takes the place of the second one.
            with self.assertRaisesRegex((RuntimeError, ValueError), "rank 0, step 0: .*; a step is not tried again"):
                for layer in range(2):
                    forward(layer)
            self.assertEqual(step.forward, [1 if named else 2])


if __name__ == "__main__":
    unittest.main()
