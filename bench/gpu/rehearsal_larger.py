"""What comes back where only shapes beside PyTorch show what is wrong: the emulated GPU's number, and where warps wait;
and who is asked for that number.

In: the pack of rehearsal.py; a Python with PyTorch, as `make test` keeps one in the user's cache. Without it what needs
it is skipped, and without a file system for a test what needs that. Out: unittest's verdict.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import rehearsal
from rehearsal import BAD, GOOD, LONG, PACK, load_tests  # noqa: F401


class Larger(rehearsal.Play):
    def test_the_emulated_gpu_is_asked_for_a_row(self) -> None:
        # Scores of 0: O is the mean of V, LSE the logarithm of the count.
        first = {"pass": "forward", "heads": [1, 1, 64], "documents": [document((2, 3), (0, 3))]}
        ones, threes = b"\x80\x3f" * 64, b"\x40\x40" * 64
        tensors = bytes(128) + bytes(3 * 128) + ones + threes + ones
        self.assertAlmostEqual(self.given(first, ("O", [0], 63), tensors), 5 / 3, delta=0.01)
        self.assertAlmostEqual(self.given(first, ("LSE", [0], 0), tensors), 1.0986, delta=0.001)

    def test_the_emulated_gpu_is_asked_for_a_key_of_several_blocks(self) -> None:
        # P is 1 where scores and LSE are 0: dV is the sum of dO.
        blocks = [document((0, 128), (0, 128), mask=0), document((0, 64), (0, 128), mask=0)]
        first = {"pass": "backward", "heads": [1, 1, 64], "documents": blocks}
        tensors = bytes(192 * 128) + b"\x80\x3f" * 64 * 192 + bytes(2 * 2 * 128 * 128) + bytes(2 * 4 * 192)
        self.assertAlmostEqual(self.given(first, ("dV", [5, 128 + 5], 7), tensors), 192, delta=0.5)

    def given(self, first: dict, at: tuple[str, list[int], int], tensors: bytes) -> float:
        path = self.folder / "it.given"
        what, rows, column = at
        document = first | {"at": {"what": what, "rows": rows, "head": 0, "column": column}}
        path.write_bytes(json.dumps(document).encode() + b"\n" + tensors)
        lines = self.folder / "it.jsonl"
        lines.unlink(missing_ok=True)
        command = [PACK / "cadre-gpu-probe", "--part", "given", "--case", path, "--lines", lines]
        subprocess.run(command, check=True, env={"LD_LIBRARY_PATH": str(PACK / "emulated")}, capture_output=True)
        return next(float(it["value"]) for it in map(json.loads, lines.read_text().splitlines()) if "value" in it)

    def test_the_emulated_gpu_is_asked_where_the_driver_has_the_name_that_is_tried_first(self) -> None:
        machine, cache = self.folder / "machine", self.folder / "ld.so.cache"
        machine.mkdir()
        driver = (PACK / "emulated" / "libcuda.so.1").read_bytes()
        self.assertIn(b"emulated\0", driver)
        (machine / "libcuda.so.1").write_bytes(driver.replace(b"emulated\0", b"machine!\0"))
        (machine / "libcuda.so").symlink_to("libcuda.so.1")
        (self.folder / "conf").write_text(f"{machine}\n")
        made = ["/sbin/ldconfig", "-X", "-C", str(cache), "-f", str(self.folder / "conf")]
        mount = f'/bin/mount --bind {cache} /etc/ld.so.cache && exec "$@"'
        inside = ("/usr/bin/unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c", mount, "sh")
        try:
            subprocess.run(made, check=True, capture_output=True)
            subprocess.run([*inside, "/bin/true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as why:
            self.skipTest(f"this machine shows a test no other cache of libraries: {why}")
        summary = self.summary(self.play("--only", "smoke,diagnosis", WRONG=BAD, before=inside))
        self.assertRegex(summary, r"the emulated GPU has \S+ there: the kernel's source is right as we read")

    def torch(self) -> dict:
        """How to start a run with PyTorch, whose parts find what the smoke test is not asked for."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cadre"
        for folder in sorted(cache.glob("pytorch-*")):
            packages = next(iter(folder.glob("lib/python*/site-packages")), None)
            if packages and (folder / "complete").exists():
                return {"python": str(folder / "bin/python3"), "packages": packages}
        return self.skipTest("there is no PyTorch in the user's cache")

    def test_numbers_are_wrong_that_only_larger_shapes_show(self) -> None:
        # As dQ would be by another swizzle; the smoke test is left out, so a part beside PyTorch finds it.
        came = self.play("--only", "kernels", kernels=BAD, WRONG=BAD, **self.torch())
        summary = self.summary(came)
        self.assertEqual(came.content["kernels"], {BAD: "wrong"})
        wrong = next(it["wrong"] for it in came.content["checks"] if not it["passed"])
        self.assertEqual(wrong["columns"], "32-63")
        self.assertRegex(wrong["tile"], r"row \d+, tile of rows \d+, warpgroup 1, warp \d, lane \d+, register \d+")
        self.assertIn(f"DIAGNOSIS {BAD}: wrong in dQ; first {wrong['first']}", summary)
        found = re.search(r"the emulated GPU has (\S+) there: the kernel's source is right as we read", summary)
        self.assertIsNotNone(found, summary)
        right = float(wrong["right"])
        self.assertAlmostEqual(float(found[1]), right, delta=0.02 * max(1, abs(right)))

    @LONG
    def test_dq_in_bf16_is_wrong_that_only_larger_shapes_show(self) -> None:
        came = self.play("--only", "kernels", kernels=BAD, WRONG="cadre_finish_dq", **self.torch())
        self.assertEqual(came.content["kernels"], {BAD: "right", "cadre_finish_dq": "wrong"})
        summary = self.summary(came)
        self.assertRegex(summary, r"FAILED .*, dQ in bf16, against float64: dQ, \d")
        self.assertRegex(summary, r"DIAGNOSIS cadre_finish_dq: wrong in bits of dQ, dQ; first dQ:\d+:\d+:\d+: ")

    @LONG
    def test_a_kernel_hangs_that_only_larger_shapes_show(self) -> None:
        came = self.play("--only", "kernels", kernels=GOOD, HANG=GOOD, **self.torch())
        self.assertEqual(came.content["kernels"], {GOOD: "hang"})
        summary = self.summary(came)
        self.assertRegex(summary, rf"DIAGNOSIS {GOOD}: hangs: block \d, thread \d+ waits too long")
        self.assertRegex(summary, r"\d+ warps wait for [kvq]_(full|empty)(\[\d\])?, parity [01]: block \d warp \d")


def document(rows: tuple[int, int], keys: tuple[int, int], mask: int = 1) -> dict:
    """As `document` of given.py."""
    return {"mask": mask, "document_rows": keys[1], "rows": rows, "keys": keys}
