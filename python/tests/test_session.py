"""Jobs of `cadre run` whose ranks call `cadre.Session`, or lend it tensors that lie on an emulated GPU.

In: the folder of the programs as CADRE_PROGRAMS. Each rank checks its own results; see session_rank.py, lent_rank.py.
"""

import math
import os
import sys
from pathlib import Path
from unittest import mock

import cadre
import gpu_memory
from test_pool import HERE, PROGRAM, ROOT, RealProcesses, manifest

sys.path.insert(0, str(ROOT / "bench/gpu"))
import pack
import torch_rows


class Sessions(RealProcesses):
    def test_two_micro_batches_are_with_the_pool_at_once_and_a_refused_result_eats_no_ticket(self) -> None:
        self.complete(manifest(script=HERE / "session_rank.py", servers=3), "--fault", "kill-server:0@1:bwd")


class Lent(RealProcesses):
    def setUp(self) -> None:
        super().setUp()
        folder = gpu_memory.driver(Path(os.environ["CADRE_PROGRAMS"]))
        if folder is None:
            self.skipTest("no emulated driver, or no GPU kernels: `make kernels`, then the tests of cadre-kernels")
        driver = mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": str(folder)})
        driver.start()
        self.addCleanup(driver.stop)

    def test_tensors_on_a_gpu_have_the_bits_of_those_of_the_host_whatever_server_dies(self) -> None:
        # As `make gpu-check` runs it, from a folder with all that it needs.
        for it in (*(HERE / it for it in torch_rows.FILES), Path(cadre.__file__).parent):
            (self.folder / it.name).symlink_to(it)
        with mock.patch.dict(pack.COPIES, {"cadre": PROGRAM}):
            rows = list(torch_rows.check(self.folder, 300, {}, ["--emulated"], math.inf))
        self.assertEqual(len(rows), 5)
        for row in rows:
            self.assertTrue(row["passed"], row)
