"""What a table of results may be off, and what never passes: a few rows, tiles or heads that are grossly wrong.

In: PyTorch of this Python, or of one that `make test` keeps in the user's cache; without any it is skipped. Out:
unittest's verdict.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent

try:
    import torch
except ImportError:
    torch = None


def python_with_torch() -> Path | None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cadre"
    found = (it / "bin" / "python3" for it in sorted(cache.glob("pytorch-*")) if (it / "complete").exists())
    return next(found, None)


@unittest.skipIf(torch, "this Python runs the plants itself")
class OtherPythonTest(unittest.TestCase):
    def test_plants_by_a_python_with_torch(self) -> None:
        python = python_with_torch()
        if python is None:
            self.skipTest("there is no PyTorch in the user's cache")
        command = [python, "-B", "-m", "unittest", "test_correctness"]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"Ran ([4-9]|[1-9][0-9]) tests")


@unittest.skipIf(torch is None, "needs PyTorch")
class PlantsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        import cases
        import correctness
        from given import Inputs
        from ours import Heads

        cls.correctness = correctness
        batch = correctness.medium(Heads(8, 2, 64))
        tensors = cases.Tensors.random(batch, torch.device("cpu"), 1)
        cls.right, _ = cases.reference(batch, tensors, torch.float32)
        cls.inputs = Inputs(batch, tensors)
        generator = torch.Generator().manual_seed(2)

        def rounded(it: torch.Tensor) -> torch.Tensor:
            # What rounding P and dS to bf16 gives.
            return it * (1 + 2.5e-3 * torch.randn(it.shape, generator=generator))

        r = cls.right
        cls.ours = cases.Results(
            r.out.to(torch.bfloat16), r.lse * (1 + 1e-7), rounded(r.dq), rounded(r.dk), rounded(r.dv)
        )

    def row(self, what: str, plant: object = None) -> dict:
        """Of a table with a plant."""
        field = {"O": "out", "LSE": "lse", "dQ": "dq", "dK": "dk", "dV": "dv"}[what]
        kept = getattr(self.ours, field)
        table = kept.clone()
        if plant:
            plant(table)
        setattr(self.ours, field, table)
        try:
            (row,) = self.correctness.rows_of(self.inputs, (what,), self.ours, self.right, "it")
        finally:
            setattr(self.ours, field, kept)
        return row

    def test_what_rounding_gives_passes(self) -> None:
        for what in ("O", "LSE", "dQ", "dK", "dV"):
            row = self.row(what)
            self.assertTrue(row["passed"], row)

    def test_a_few_that_are_grossly_wrong_do_not_pass(self) -> None:
        def zero(*at: object):
            return lambda it: it.__setitem__(at, 0)

        def of_another_head(it: torch.Tensor) -> None:
            it[2032:2048, 3] = it[2032:2048, 4].clone()

        plants = [
            ("O", zero(2000, 3), "row 2000 of head 3"),
            ("O", zero(slice(1984, 2000), 3, slice(0, 2)), "row "),
            ("O", of_another_head, "row 20"),
            ("O", lambda it: it.__setitem__((2000, 3, 5), 1.0), "row 2000 of head 3"),
            ("LSE", lambda it: it.__setitem__((2000, 3), 9.0), "row 2000 of head 3"),
            ("dQ", zero(slice(2040, 2048), 3), "row 204"),
            ("dK", zero(slice(1984, 2048), 0), ""),
            ("dV", zero(slice(1984, 2048)), ""),
            ("dV", zero(2047), "row 2047"),
            # Less than a row may be, in all rows of a tile.
            ("dV", lambda it: it[1984:2048, 1].mul_(1.04), "tile of keys from row 1984 of head 1"),
            ("dK", lambda it: it[1984:2048, 1].mul_(1.04), "tile of keys from row 1984 of head 1"),
        ]
        for what, plant, words in plants:
            row = self.row(what, plant)
            self.assertFalse(row["passed"], f"{what}, {words}: {row['error']:.1e}")
            self.assertIn(words, row["worst"])


@unittest.skipIf(torch is None, "needs PyTorch")
class PeersTest(unittest.TestCase):
    def test_gradients_of_peers_are_compared(self) -> None:
        import cases
        import peers
        import speed
        from ours import Heads
        from torch.nn.attention import SDPBackend

        batch = cases.dense(Heads(4, 2, 64), 256, 2, cases.CAUSAL)
        tensors = cases.Tensors.random(batch, torch.device("cpu"), 1)
        right, _ = cases.reference(batch, tensors, torch.float32)
        peer = peers.sdpa(batch, tensors, SDPBackend.MATH, "it", False)
        peer.forward()
        peer.backward()
        self.assertEqual(speed.gradients_off(right, peer.gradients()), "")
        for field, what in (("dq", "dQ"), ("dk", "dK"), ("dv", "dV")):
            kept = getattr(right, field).clone()
            getattr(right, field)[448:512, 1] = 0
            self.assertRegex(speed.gradients_off(right, peer.gradients()), rf"{what} is off by \S+ in head 1")
            setattr(right, field, kept)
        # Late keys are small numbers.
        right.dv[448:512, 1] *= 1.12
        self.assertRegex(speed.gradients_off(right, peer.gradients()), r"dV is off by \S+ in rows from 448 of head 1")

    def test_gradients_of_copied_keys_are_added(self) -> None:
        import cases
        import peers
        from ours import Heads

        batch = cases.short_tasks(Heads(2, 1, 64), 1024, 4)
        tensors = cases.Tensors.random(batch, torch.device("cpu"), 1)
        k, v, keys = peers.with_own_keys(batch, tensors)
        self.assertEqual((len(k), batch.kv_rows), (sum(keys), max(keys)))
        dq, dk, dv = peers.of_batch(batch, tensors, tensors.q, k, v)
        # As many tasks hold the first key; one the last.
        self.assertTrue(torch.allclose(dk[0], tensors.k[0].float() * len(keys)))
        self.assertTrue(torch.allclose(dv[-1], tensors.v[-1].float()))
        self.assertIs(dq, tensors.q)


@unittest.skipIf(torch is None, "needs PyTorch")
class OneGpuTest(unittest.TestCase):
    def test_a_part_ends_where_pytorch_has_another_gpu_than_the_kernels(self) -> None:
        import child

        with mock.patch.object(child, "leave") as left, contextlib.redirect_stdout(io.StringIO()) as printed:
            for same in ("0a1B-2", "GPU-0A1b-2", ""):
                child.one_gpu("GPU-0a1b-2", same, 2)
            # A slice of the only GPU, by the name of the slice and by that of the whole.
            child.one_gpu("GPU-0a1b-2", "0a1b-3", 1)
            left.assert_not_called()
            child.one_gpu("GPU-0a1b-2", "0a1b-3", 2)
            left.assert_called_once_with(child.OTHER_GPU)
        self.assertIn("PyTorch has GPU 0a1b-3, the driver's first is GPU-0a1b-2: set", printed.getvalue())


@unittest.skipIf(torch is None, "needs PyTorch")
class Flash3Test(unittest.TestCase):
    def test_what_is_asked_lies_as_the_c_face_has_it(self) -> None:
        import flash3

        source = HERE / "fa3" / "fa3.cu"
        if not source.exists():
            self.skipTest("a pack has no sources of peers")
        struct = re.search(r"struct Fa3 {(.*?)};", source.read_text(), re.DOTALL)[1]
        kinds = {"void": "c_void_p", "int64_t": "c_long", "int": "c_int", "float": "c_float"}
        found = [
            (name.strip(" *"), kinds[kind])
            for kind, names in re.findall(r"(\w+) ([^;]+);", struct)
            for name in names.split(",")
        ]
        self.assertEqual(found, [(name, kind.__name__) for name, kind in flash3.Asked._fields_])

    def test_scratch_is_as_large_as_tiles_need(self) -> None:
        import cases
        import flash3
        from ours import Heads

        # By FlashAttention's mha_bwd, of a document of 1000 rows.
        for mask, q_rows in ((cases.CAUSAL, 1024), (cases.FULL, 1040)):
            batch = cases.dense(Heads(4, 2, 128), 1000, 1, mask)
            found = flash3.sizes(batch, [1000], [1000], True)
            self.assertEqual((found["dq_accum"], found["dk_accum"]), (4 * q_rows * 128, 2 * 1024 * 128), mask)
            self.assertEqual(found["delta"], 4 * q_rows)


@unittest.skipIf(torch is None, "needs PyTorch")
class RatiosTest(unittest.TestCase):
    def test_a_ratio_has_the_larger_spread_of_both(self) -> None:
        import speed

        def row(kernel: str, seconds: float, spread: float) -> dict:
            return {"kernel": kernel, "direction": "backward", "l2": "warm", "seconds": seconds, "spread": spread}

        rows = [row("Cadre", 1.0, 0.01), row("cuDNN", 1.1, 0.2), row("FA2 deterministic", 2.0, 0.001)]
        speed.add_ratios(rows)
        self.assertAlmostEqual(rows[0]["ratio"], 1.1)
        self.assertEqual((rows[0]["ratio_spread"], rows[0]["ratio_deterministic_spread"]), (0.2, 0.01))


if __name__ == "__main__":
    sys.exit(unittest.main())
