"""The GPU kernels called from PyTorch through their C face: the example of kernels/c, over the emulated driver."""

import os
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class CFaceTest(unittest.TestCase):
    def test_the_example_attends_as_pytorch_does(self):
        built = Path(os.environ["CADRE_PROGRAMS"])
        # Tests in Rust build it, and name its folder by a digest of its sources.
        drivers = sorted(built.glob("emulated-gpu-*/driver/libcuda.so.1"), key=lambda it: it.stat().st_mtime)
        if not drivers or not any((built.parent / "kernels").glob("forward.cubin")):
            self.skipTest("no emulated driver, or no GPU kernels: `make kernels`, then the tests of cadre-kernels-c")
        folders = f"{built}:{drivers[-1].parent}"
        example = ROOT / "kernels/c/examples/attention.py"
        # The example opens the GPU once, with three modules, forward and backward.
        own = {"LD_LIBRARY_PATH": folders, "CADRE_EMULATED_MODULES": "3"}
        command, environment = [sys.executable, example], {**os.environ, **own}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([it.split(":")[0] for it in done.stdout.splitlines()], ["O", "dQ", "dK", "dV"])
