"""What comes back where the machine is not as the check wants it: drivers, PyTorch, disks, signals, tools that hang.

In: the pack of rehearsal.py. Out: unittest's verdict.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import rehearsal
from rehearsal import BAD, GOOD, LONG, NAMES, PACK, SEEN, load_tests  # noqa: F401


class Machine(rehearsal.Play):
    def test_the_machine_is_older_than_the_pack(self) -> None:
        facts = json.loads((PACK / "pack.json").read_text())
        (PACK / "pack.json").write_text(json.dumps(facts | {"glibc": "9.1"}))
        self.addCleanup(lambda: (PACK / "pack.json").write_text(json.dumps(facts)))
        came = self.play("--only", "smoke", kernels=GOOD)
        self.assertRegex(
            self.summary(came), r"FAILED pack: its programs need glibc 9\.1, this machine has 2\.\d+: they"
        )

    def test_programs_have_lost_their_modes(self) -> None:
        (PACK / "cadre-gpu-probe").chmod(0o644)
        came = self.play("--only", "smoke", kernels=GOOD)
        self.assertEqual((came.code, came.content["kernels"]), (0, {GOOD: "right"}))

    def test_there_is_no_torch(self) -> None:
        came = self.play()
        summary = self.summary(came)
        self.assertEqual((came.code, set(came.content["kernels"].values())), (1, {"right"}))
        self.assertEqual(summary.count("FAILED"), 1)
        self.assertIn("FAILED PyTorch: is not on this machine", summary)

    def test_torch_is_there_and_cannot_be_imported(self) -> None:
        packages = self.folder / "packages"
        (packages / "torch-2.11.0.dist-info").mkdir(parents=True)
        (packages / "torch-2.11.0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n"
        )
        (packages / "torch").mkdir()
        (packages / "torch" / "__init__.py").write_text("import no_such_library_of_torch\n")
        came = self.play(packages=packages)
        summary = self.summary(came)
        self.assertEqual(came.content["kernels"], {GOOD: "right", BAD: "right"})
        # As many parts as there are end so; their cause is told once.
        self.assertRegex(summary, r"this Python has no no_such_library_of_torch \(and \d+ more rows of this cause\)")
        self.assertEqual(summary.count("FAILED"), 1)

    def test_the_driver_is_old(self) -> None:
        came = self.play(DRIVER="12080")
        self.assertEqual((came.code, came.content["checks"]), (3, []))
        words = (
            "NOTHING WAS RUN on a GPU: the CUDA driver is for CUDA 12080, the kernels need 13000; install driver 580"
        )
        self.assertIn(words, self.summary(came))

    def test_the_gpu_is_too_old(self) -> None:
        came = self.play(CAPABILITY="75")
        self.assertIn("has compute capability 7.5, the kernels are for 8.0 and newer", self.summary(came))
        self.assertEqual(came.code, 3)

    def test_the_gpu_runs_the_portable_kernels(self) -> None:
        came = self.play(CAPABILITY="80")
        summary = self.summary(came)
        self.assertEqual(came.content["kernels"], {GOOD: "right", BAD: "right"})
        self.assertIn(
            "not run: forms: poll: a form of the kernels for Hopper; this GPU runs the portable ones", summary
        )
        self.assertEqual({it["form"] for it in came.content["forms"]}, {"as built"})
        # No PyTorch is there.
        self.assertEqual((came.code, summary.count("FAILED")), (1, 1))

    def test_there_is_no_gpu(self) -> None:
        came = self.play(GPUS="0")
        self.assertIn("there is no GPU 0, this process may see 0", self.summary(came))
        self.assertEqual(came.code, 3)

    def test_it_is_cut(self) -> None:
        process = self.start(HANG=BAD)
        printed = ""
        # Killed without a word, as soon as something is known.
        while "so far:\n" not in printed:
            printed += process.stdout.readline()
            self.assertIsNone(process.poll(), printed)
        printed += process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        came = self.came(process)
        self.assertIn("a launch does not end", (printed + came.seen)[-SEEN:])
        self.assertEqual(came.content["checks"][-1]["kernel"], BAD)
        # A file may be there that was being written.
        self.assertIn("gpu-check.json", came.files)
        self.assertLessEqual(came.files, NAMES | {f".{it}.new" for it in NAMES})
        # What it had started dies with it.
        end = time.monotonic() + 60
        while names(str(self.out.parent)):
            self.assertLess(time.monotonic(), end, "a process was left behind")
            time.sleep(0.02)

    def test_nvidia_smi_hangs(self) -> None:
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        self.tool("nvidia-smi", f"#!/bin/sh\ntrap '' TERM INT HUP\nread word < {pipe}\n")
        came = self.play("--only", "smoke", kernels=GOOD)
        self.assertEqual((came.code, came.content["kernels"]), (0, {GOOD: "right"}))
        self.assertIn("clocks unknown: nvidia-smi does not answer", self.summary(came))
        for row in came.content["checks"]:
            self.assertEqual(row["provenance"]["clocks"], "unknown: nvidia-smi does not answer")

    @LONG
    def test_there_are_two_at_once(self) -> None:
        process = self.start(HANG=BAD)
        printed = ""
        while "smoke: backward d64, and finish_dq" not in printed:
            printed += process.stdout.readline()
            self.assertIsNone(process.poll(), printed)
        second = self.start()
        said, _ = second.communicate()
        self.assertEqual(second.returncode, 2)
        self.assertRegex(said, r"^error: another run uses .*: two at once disturb each other's times; wait for its end")
        # The first goes on as if nothing had been.
        came = self.came(process)
        self.assertEqual((came.code, came.content["kernels"]), (1, {GOOD: "right", BAD: "hang"}))

    def test_who_has_started_it_goes_away(self) -> None:
        process = self.start("--only", "smoke", kernels=GOOD)
        process.stdout.readline()
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        self.assertEqual(process.wait(), 0)
        content = json.loads((self.out / "gpu-check.json").read_text())
        self.assertEqual(content["kernels"], {GOOD: "right"})
        self.assertIn("logs.tar.gz", {it.name for it in self.out.iterdir()})

    @LONG
    def test_the_output_cannot_be_made(self) -> None:
        (self.folder / "file").write_text("")
        self.out = self.folder / "file" / "out"
        came = self.came(self.start(HANG=BAD))
        self.assertEqual(came.code, 1)
        self.assertRegex(came.seen, rf"DIAGNOSIS {BAD}: hangs: block")
        self.assertEqual(came.seen.strip().splitlines()[-1], "gpu-check.json is not whole: Not a directory")

    def test_the_disk_is_full(self) -> None:
        small = self.folder / "small"
        small.mkdir()
        # A disk of one page, for whatever is written: logs, lines, output.
        mount = f'/bin/mount -t tmpfs -o size=4k,nr_inodes=200 none {small} && exec "$@"'
        inside = ("/usr/bin/unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c", mount, "sh")
        path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        possible = subprocess.run([*inside, "true"], capture_output=True, env=path, check=False)
        if possible.returncode != 0:
            self.skipTest("this machine makes no file system for a test")
        self.out = small / "out"
        came = self.came(self.start("--only", "smoke", kernels=GOOD, before=inside))
        # Lines of the report go where there is room, and come back as words.
        self.assertIn("gpu-check.json is not whole: No space left on device", came.seen)

    def test_its_time_is_over(self) -> None:
        came = self.play("--seconds", "0.5")
        self.assertIn("left out for want of time", self.summary(came))
        # Of half a second: what was checked, if anything, has passed.
        checks = came.content["checks"]
        self.assertEqual(came.code, 4 if checks and all(it["passed"] for it in checks) else 1)

    def test_the_output_takes_nothing(self) -> None:
        for name in ("gpu-check.json", "logs.tar.gz"):
            (self.out / name / "in the way").mkdir(parents=True)
        came = self.play(HANG=BAD)
        self.assertEqual(came.code, 1)
        self.assertRegex(came.seen.strip().splitlines()[-1], r"gpu-check.json is not whole: \w+")
        self.assertRegex(came.seen, rf"DIAGNOSIS {BAD}: hangs: block")
        self.assertEqual(came.files, {"gpu-check.json", "logs.tar.gz"})


def names(word: str) -> list[str]:
    """Living processes whose command names `word`."""
    found = []
    for it in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (it / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if word.encode() in (it / "cmdline").read_bytes() and state not in "ZX" and it.name != str(os.getpid()):
                found.append(it.name)
    return found
