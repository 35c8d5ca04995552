"""What a run does before it begins, and what its diagnosis asks for: a pack that is not whole, machines that are in
trouble, inputs of a wrong number. Needs no GPU.

In: packs and programs, written here. Out: unittest's verdict. Nothing is judged by how long it takes.
"""

import ast
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import causes
import diagnosis
import given
import keep
import machine
import pack
from parts import Parts
from report import Report

HERE = Path(__file__).resolve().parent
# Of machines that are lent and of containers: the oldest that may have a driver for these kernels.
OLDEST = (3, 9)
OWN = {*(it.name for it in HERE.glob("rehearsal*.py")), "merge.py"}


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        self.out = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.printed = self.enterContext(contextlib.redirect_stdout(io.StringIO()))
        self.enterContext(mock.patch.object(tempfile, "tempdir", tempfile.tempdir))

    def program(self, name: str, text: str) -> Path:
        path = self.out / name
        path.write_text(text)
        path.chmod(0o755)
        return path


def older_pythons() -> list[str]:
    """Pythons of this machine that are older than this one."""
    found = []
    others = [Path(it) for it in os.environ.get("PATH", "").split(":")]
    others += sorted(Path(sys.base_prefix).parent.glob("*/bin"))
    for minor in range(OLDEST[1], sys.version_info[1]):
        for folder in others:
            program = folder / f"python3.{minor}"
            with contextlib.suppress(OSError):
                if subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0:
                    found.append(str(program))
                    break
    return found


class PythonTest(Folder):
    def test_what_is_packed_is_python_of_the_oldest_kind(self) -> None:
        for path in HERE.glob("*.py"):
            if path.name.startswith("test_") or path.name in OWN:
                continue
            tree = ast.parse(path.read_text(), str(path), feature_version=OLDEST)
            # Types are words there, not expressions.
            imported = [it.module for it in tree.body if isinstance(it, ast.ImportFrom)]
            self.assertIn("__future__", imported, path)
            for node in ast.walk(tree):
                newer = isinstance(node, ast.Attribute) and (node.attr, "datetime") == (
                    "UTC",
                    getattr(node.value, "id", ""),
                )
                keywords = {it.arg for it in getattr(node, "keywords", [])}
                newer |= bool(keywords & {"strict", "ignore_cleanup_errors", "process_group", "slots", "kw_only"})
                self.assertFalse(newer, f"{path}:{getattr(node, 'lineno', 0)} is newer than Python 3.9")

    def test_it_says_what_is_missing_by_every_older_python_of_this_machine(self) -> None:
        pythons = older_pythons()
        if not pythons:
            self.skipTest("this machine has no older Python")
        pack_of = self.out / "pack"
        pack_of.mkdir()
        for path in HERE.glob("*.py"):
            (pack_of / path.name).write_text(path.read_text())
        for name in ("pretrain", "prolong"):
            (pack_of / "workloads").mkdir(exist_ok=True)
            (pack_of / "workloads" / f"{name}.json").write_text('{"ranks": [[128]]}')
        for python in pythons:
            command = [python, "-S", "-B", str(pack_of / "run.py"), "--dry", "--only", "smoke,kernels"]
            environment = {"PATH": "/nowhere", "PYTHONIOENCODING": "ascii"}
            done = subprocess.run(
                [*command, "--out", str(self.out / "out")], capture_output=True, text=True, check=False, env=environment
            )
            self.assertEqual((done.stderr, done.returncode), ("", 1), python)
            self.assertIn("FAILED part smoke: could not be started", done.stdout)
            self.assertEqual(done.stdout.splitlines()[-1], "checks: 3, failed: 3")


class PackTest(Folder):
    def test_files_that_are_not_as_they_were_packed_are_named(self) -> None:
        digest = hashlib.sha256(b"whole").hexdigest()[:12]
        facts = {"commit": "abc", "files": {it: [5, digest] for it in ("cut", "other", "gone", "whole")}}
        for name, content in (("cut", b"who"), ("other", b"whOle"), ("whole", b"whole")):
            (self.out / name).write_bytes(content)
        with mock.patch.object(pack, "HERE", self.out):
            wrong = pack.wrong_files(facts)
        words = ["cut has 3 bytes of 5", "other has other bytes", "gone cannot be read (No such file or directory)"]
        self.assertEqual(wrong, words)
        self.assertEqual(facts, {"commit": "abc"})

    def test_a_pack_without_a_word_of_itself_runs(self) -> None:
        (self.out / "pack.json").write_text('{"commit": "ab')
        with mock.patch.object(pack, "HERE", self.out):
            facts, why = pack.facts()
        self.assertEqual(facts, {"commit": "unknown"})
        self.assertIn("copy the pack again", why)

    def test_programs_of_a_pack_that_nobody_may_change_are_copied(self) -> None:
        (self.out / "cadre").write_text("#!/bin/sh\necho runs\n")
        change, work = Path.chmod, self.out / "work"
        work.mkdir()

        def refused(path: Path, mode: int) -> None:
            if path.parent == self.out:
                raise PermissionError(1, "Operation not permitted")
            change(path, mode)

        with (
            mock.patch.object(pack, "HERE", self.out),
            mock.patch.object(Path, "chmod", refused),
            mock.patch.dict(pack.COPIES),
        ):
            self.assertEqual(pack.make_runnable(work), [])
            done = subprocess.run([pack.program("cadre")], capture_output=True, text=True, check=False)
        self.assertEqual(done.stdout, "runs\n")

    def test_a_wheel_that_is_cut_costs_its_peer(self) -> None:
        (self.out / "wheels").mkdir()
        (self.out / "wheels" / "peer.whl").write_bytes(b"PK\x03\x04 and no more")
        with mock.patch.object(pack, "HERE", self.out):
            (why,) = pack.unpack_wheels(self.out / "packages")
        self.assertRegex(why, r"peer\.whl cannot be unpacked \(.*\): what it is for will be missing")

    def test_two_runs_do_not_share_an_output(self) -> None:
        held, why = pack.alone(self.out)
        self.assertEqual(why, "")
        also, why = pack.alone(self.out)
        self.assertIn("another run uses", why)
        for it in [*held, *also]:
            os.close(it)
        held, why = pack.alone(self.out, self.out / "not there")
        self.assertEqual(why, "")
        os.close(held[0])

    def test_logs_go_where_there_is_room(self) -> None:
        real = pack.shutil.disk_usage

        def usage(place: str):
            found = real(place)
            return found._replace(free=0) if place == str(self.out) else found

        with mock.patch.object(tempfile, "tempdir", str(self.out)), mock.patch.object(pack.shutil, "disk_usage", usage):
            found = pack.working_folder()
            self.assertNotEqual(found.parent, self.out)
            # Others follow.
            self.assertEqual(tempfile.gettempdir(), str(found))
        pack.shutil.rmtree(found)


class MachineTest(Folder):
    def test_nobody_waits_for_an_nvidia_smi_that_does_not_answer(self) -> None:
        pipe = self.out / "pipe"
        os.mkfifo(pipe)
        tool = self.program("nvidia-smi", f"#!/bin/sh\ntrap '' TERM INT HUP\nread word < {pipe}\n")
        with mock.patch.object(machine, "tool", lambda _: str(tool)):
            card = machine.Card(self.out / "card.csv")
        report = Report(self.out / "gpu-check.json")
        report.card = card.now
        report.check("it", "is", True)
        self.assertIsNone(card.process.poll())
        row = report.content["checks"][0]
        self.assertEqual(row["provenance"]["clocks"], "unknown: nvidia-smi does not answer")
        card.end()
        self.assertIsNotNone(card.process.poll())

    def test_rows_say_the_driver_as_soon_as_it_is_known(self) -> None:
        tool = self.program(
            "nvidia-smi", "#!/bin/sh\necho 'NVIDIA H200, 580.65.06, 700.00, 1980, 143771, 0, 0, Default, GPU-1'\n"
        )
        with mock.patch.object(machine, "tool", lambda _: str(tool)):
            card = machine.Card(self.out / "card.csv")
        card.process.wait()
        report = Report(self.out / "gpu-check.json")
        report.content["clocks"] = "unknown: nvidia-smi does not answer"
        report.card = card.now
        report.check("it", "is", True)
        origin = report.content["checks"][0]["provenance"]
        self.assertEqual((origin["driver"], origin["power_limit_w"]), ("580.65.06", "700.00"))
        self.assertNotIn("clocks", origin)

    def test_the_driver_is_known_without_nvidia_smi(self) -> None:
        version = self.out / "version"
        version.write_text(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 12\n"
        )
        with mock.patch.object(machine, "DRIVER", version):
            self.assertEqual(machine.facts()["driver"], "580.65.06")
        with mock.patch.object(machine, "DRIVER", self.out / "not there"):
            self.assertNotIn("driver", machine.facts())


class OutputTest(Folder):
    def test_a_folder_that_cannot_be_made_costs_the_files_alone(self) -> None:
        (self.out / "a file").write_text("")
        out = self.out / "a file" / "out"
        report = Report(out / "gpu-check.json")
        report.check("it", "is", True)
        report.store()
        keep.clear(out)
        self.assertIn("cannot be written", keep.archive(self.out, out))
        self.assertIn("cannot be written", keep.whole(self.out / "a file", out))
        report.table()
        self.assertIn("gpu-check.json is not whole: Not a directory", self.printed.getvalue())

    def test_what_an_earlier_run_left_is_removed_and_nothing_else(self) -> None:
        names = ["gpu-check.json", "trace.json", ".logs.tar.gz.new", "mine.json"]
        for name in names:
            (self.out / name).write_text("")
        keep.clear(self.out)
        self.assertEqual([it.name for it in self.out.iterdir()], ["mine.json"])

    def test_the_file_is_json_whatever_numbers_there_are(self) -> None:
        report = Report(self.out / "gpu-check.json")
        report.add("checks", {"check": "it", "what": "O", "error": float("nan"), "passed": False})
        report.add("speeds", {"case": "it", "seconds": 1.0, "share_of_matmul": float("nan")})
        report.store()

        def refuse(word: str) -> None:
            raise AssertionError(word)

        content = json.loads((self.out / "gpu-check.json").read_text(), parse_constant=refuse)
        self.assertEqual(content["checks"][0]["error"], 1e30)
        self.assertNotIn("share_of_matmul", content["speeds"][0])

    def test_a_reader_that_has_gone_costs_the_words_alone(self) -> None:
        reads, writes = os.pipe()
        os.close(reads)
        report = Report(self.out / "gpu-check.json")
        with os.fdopen(writes, "w", closefd=False) as gone, contextlib.redirect_stdout(gone):
            report.say("nobody hears it")
            report.table()
            sys.stdout.close()
            with contextlib.suppress(OSError):
                gone.close()
        os.close(writes)


@dataclass
class Line:
    """As `Line` of ours.py."""

    mask: int
    document_rows: int
    rows_begin: int
    rows_end: int
    q_row: int
    keys_begin: int
    keys_end: int
    kv_row: int
    dkv_row: int
    bundle: int


class GivenTest(unittest.TestCase):
    def test_a_row_comes_with_the_keys_that_it_keeps(self) -> None:
        lines = [Line(1, 100, 10, 50, 0, 0, 50, 0, 0, 0), Line(2 + 70, 400, 100, 400, 40, 30, 400, 50, 50, 1)]
        found = given.of_row(lines, 3)
        self.assertEqual(found.documents, [given.document(1, 100, (13, 14), (0, 14))])
        self.assertEqual((found.q_rows, found.kv_rows, found.rows), ([3], list(range(14)), [0]))
        # Position 210 of the second keeps the 70 keys before it.
        found = given.of_row(lines, 150)
        self.assertEqual(found.documents, [given.document(72, 400, (210, 211), (140, 211))])
        self.assertEqual((found.kv_rows[0], len(found.kv_rows)), (50 + 140 - 30, 71))

    def test_a_key_comes_with_all_rows_of_its_bundle(self) -> None:
        lines = [Line(1, 150, 0, 37, 0, 0, 150, 5, 5, 0), Line(1, 150, 60, 150, 37, 0, 150, 5, 5, 0)]
        found = given.of_key(lines, 5 + 70, 64, 4)
        self.assertEqual(
            [(it["rows"], it["same_bundle"]) for it in found.documents], [((0, 37), False), ((60, 150), True)]
        )
        self.assertEqual((found.q_rows, found.rows), (list(range(127)), [70]))

    def test_a_key_of_many_rows_comes_with_blocks_of_those_that_keep_it(self) -> None:
        rows = 8192
        lines = [Line(1, rows, 4096, rows, 0, 0, rows, 0, 0, 0)]
        found = given.of_key(lines, 8000, 128, 4)
        # Rows 8000 to 8191 keep it: a block of 128 and one of 64, each beside the key's tile, from 7936 on.
        self.assertEqual([it["rows"] for it in found.documents], [(0, 128), (0, 64)])
        self.assertEqual({(it["mask"], it["keys"]) for it in found.documents}, {(0, (0, 128))})
        self.assertEqual((found.q_rows[0], found.q_rows[-1]), (8000 - 4096, rows - 1 - 4096))
        self.assertEqual(found.kv_rows, [*range(7936, 8064), *range(7936, 8064)])
        self.assertEqual(found.rows, [64, 128 + 64])


class DiagnosisTest(Folder):
    """The probe and the child are played by programs that tell what theirs do."""

    def diagnosis(self, rows: list[dict]) -> diagnosis.Diagnosis:
        report = Report(self.out / "gpu-check.json", seed=7)
        report.content["checks"] = rows
        parts = Parts(report, self.out, ["--seed", "7"])
        parts.program = [str(self.program("child", CHILD)), "child"]
        self.program("cadre-gpu-probe", CHILD)
        for name in ("emulated", "forms/watch"):
            (self.out / name).mkdir(parents=True)
        self.enterContext(mock.patch.object(diagnosis, "HERE", self.out))
        self.enterContext(mock.patch.object(pack, "HERE", self.out))
        return diagnosis.Diagnosis(report, parts, self.out, dict)

    def row(self, what: str, **more: object) -> dict:
        row = {"check": "it", "what": what, "error": 1.0, "passed": False, "kernel": "cadre_backward_64"}
        return row | {"part": "d64 backward", "unit": 4} | more

    def test_every_table_is_asked_for_with_the_inputs_of_its_part(self) -> None:
        wrong = {"first": "dQ:3:1:32", "ours": "9", "right": "2", "given": "/case/dQ"}
        other = wrong | {"first": "dK:5:0:1", "given": "/case/dK"}
        it = self.diagnosis([self.row("dQ", wrong=wrong), self.row("dK", wrong=other)])
        lines = it.wrong("cadre_backward_64", 1e18)
        self.assertEqual(lines[0], "wrong in dK, dQ; first dQ:3:1:32: 9, right is 2")
        self.assertIn("the emulated GPU has 2.0 there: the kernel's source is right", lines[1])
        self.assertIn("the emulated GPU has 7.5 at dK:5:0:1: it is wrong there, too", lines[2])

    def test_a_hang_of_larger_shapes_is_looked_at_in_its_own_unit(self) -> None:
        it = self.diagnosis([self.row("nothing new for 40 s, killed", how="hang")])
        lines = it.hang("cadre_backward_64", 1e18)
        self.assertEqual(lines[0], "hangs: block 5, thread 96 waits too long")
        self.assertEqual(lines[1], "1 warps wait for q_full[1], parity 1: block 5 warp 3")

    def test_a_fault_without_tools_leaves_its_core_dump(self) -> None:
        it = self.diagnosis([self.row("the GPU answers no more", how="fault")])
        with mock.patch.object(machine, "tool", lambda _: None):
            lines = it.fault("cadre_backward_64", 1e18)
        self.assertIn("its address is not known: compute-sanitizer and cuda-gdb are not on this machine", lines[0])
        self.assertIn("diagnosis/cadre_backward_64.core.gz of logs.tar.gz", lines[1])


# Tells what the probe or the child of that name would, by what it is asked.
CHILD = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1] if name in words else None
lines = open(value("--lines"), "a")
tell = lambda line: lines.write(json.dumps(line) + "\\n")
if value("--part") == "given":
    assert "emulated" in os.environ["LD_LIBRARY_PATH"]
    tell({{"facts": {{"device": "emulated"}}}})
    tell({{"value": {{"/case/dQ": "2.0", "/case/dK": "7.5"}}[value("--case")]}})
if (words[0], value("--part"), value("--unit")) == ("child", "d64 backward", "4"):
    if "watch" in (value("--form") or ""):
        warp = {{"block": 5, "warp": 3, "waits_for": "q_full[1], parity 1"}}
        tell({{"waits": {{"block": 5, "thread": 96, "warps": [warp]}}}})
    if dump := os.environ.get("CUDA_COREDUMP_FILE"):
        open(dump, "w").close()
"""


class PeersTest(unittest.TestCase):
    def test_peers_of_which_none_agrees_make_a_failed_row(self) -> None:
        row = causes.disagreement("64:8 d128, causal 16K x1", "cadre_forward_128", {"cuDNN": 0.5, "FA2": 0.4})
        self.assertEqual((row["kernel"], row["how"], row["passed"]), ("cadre_forward_128", "wrong", False))
        # One alone may be wrong itself.
        self.assertNotIn("kernel", causes.disagreement("it", "cadre_forward_128", {"FA3": 0.5}))


if __name__ == "__main__":
    unittest.main()
