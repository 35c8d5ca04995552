"""How Python jobs are shown, and how they end: exit codes of ranks, SIGTERM, checkpoints that count, a lost pool.

In: the folder of the programs as CADRE_PROGRAMS. Ranks run under a shell that writes down their exit codes, as a pod
does.
"""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

from cadre._finite import NotFinite
from test_pool import HERE, PROGRAM, ROOT, RealProcesses, losses, manifest, number

# The rank dies with its parent, which is the shell here. A signal's number is above 128.
# Writes a line when the process ends, as libraries do that were there before the package.
LIBRARY = """
import ctypes
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
getattr(libc, "__cxa_atexit")(libc.puts, ctypes.c_void_p(libc.strdup(b"a library ends")), None)
"""
SHELL = 'CADRE_PARENT_PID=$$ "$PYTHON" "$0" "$@"; code=$?; echo $code > "$CADRE_OUT/code-$RANK"; exit $code'


def shelled(*arguments: str, script: Path = HERE / "ends_rank.py", **more: object) -> str:
    pool, job = (json.loads(it) for it in manifest(*arguments, script=script, **more).split("---"))
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["command"] = ["bash", "-c", SHELL, str(script)]
    container["env"].append({"name": "PYTHON", "value": sys.executable})
    return f"{json.dumps(pool)}\n---\n{json.dumps(job)}\n"


def patient(seconds: int, *arguments: str) -> str:
    """A job that suspects a rank after so long."""
    policy = json.dumps({"suspectAfterSeconds": seconds})
    return shelled(*arguments).replace('"procsPerNode"', f'"failurePolicy": {policy}, "procsPerNode"')


def codes(out: Path) -> list[int]:
    """By rank; of those that were not killed."""
    return [int(it.read_text()) for it in sorted(out.glob("code-*"))]


class NotFinites(unittest.TestCase):
    def test_what_is_not_finite_is_told_of_20_steps_once_each(self) -> None:
        session, said = mock.Mock(), io.StringIO()
        told = NotFinite(session)
        with contextlib.redirect_stderr(said):
            for step in range(50):
                # Every other step has two, the others have none.
                for what in (None, "O is not finite", "dK is not finite"):
                    told.found(step, what if step % 2 else None)
        text = [it.args[0] for it in session.warn.call_args_list]
        self.assertEqual(said.getvalue().splitlines(), [f"cadre: {it}" for it in text])
        *first, last = text
        passed_on = "O is not finite. It is passed on, with all that follows from it in this step"
        self.assertEqual(first, [passed_on] * 19)
        self.assertEqual(last, f"{passed_on}; nothing is said of further steps")


class Shown(RealProcesses):
    def test_lines_summary_and_trace_are_those_of_its_steps(self) -> None:
        trace = self.folder / "trace.json"
        code, said, out = self.run_job(shelled(), "--json", "--trace", str(trace))
        self.assertEqual(code, 0, said)
        of_script, other = (json.loads((out / f"losses-{it}").read_text()) for it in range(2))
        self.assertEqual((len(of_script), of_script), (3, other))
        told = [json.loads(it) for it in self.lines]
        steps = [it for it in told if it["event"] == "step"]
        self.assertEqual([(it["step"], number(it["loss_bits"])) for it in steps], list(enumerate(of_script)))
        last = told[-1]
        self.assertEqual([last[it] for it in ("event", "job", "outcome", "steps")], ["summary", "job", "completed", 3])
        self.assertEqual([last["first_loss"], last["last_loss"]], [steps[0]["loss"], steps[-1]["loss"]])
        self.assertEqual(json.loads((out / "summary.json").read_text())["last_loss"], last["last_loss"])
        # Each rank waits for the phases of all steps, which it has rung for.
        events = json.loads(trace.read_text())["traceEvents"]
        names = {it["pid"]: it["args"]["name"] for it in events if it["name"] == "process_name"}
        phases = [
            f"step {step}, layer {layer}, nano-batch 0, {way}"
            for step in range(3)
            for way in ("forward", "backward")
            for layer in (range(2) if way == "forward" else reversed(range(2)))
        ]
        for rank in range(2):
            spans = [it for it in events if it["ph"] == "X" and names[it["pid"]] == f"trainer {rank}"]
            rung = sorted((it["ts"], it["args"]["detail"]) for it in spans if it["name"] == "doorbell")
            self.assertEqual([detail for _, detail in rung], phases)
            self.assertGreater(sum(it["name"] == "wait" and it["dur"] > 0 for it in spans), 0)

    def test_a_terminal_shows_its_steps_while_they_come(self) -> None:
        file, out = self.folder / "job.yaml", self.folder / "out"
        file.write_text(shelled())
        ours, theirs = pty.openpty()
        command = [PROGRAM, "run", "-f", file, "--out", out]
        more = {"stdin": theirs, "env": os.environ | {"TERM": "xterm"}, "cwd": ROOT}
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, **more) as run:
            os.close(theirs)
            shown = b""
            # The end of a terminal is an error on Linux.
            with contextlib.suppress(OSError):
                while part := os.read(ours, 1 << 16):
                    shown += part
            os.close(ours)
            self.assertEqual(run.wait(), 0, shown.decode())
        first, last = (f"{number(losses(out)[at]):.4f}" for at in (0, -1))
        # The step that is drawn over, then the summary.
        for words in (
            rf"step 0 .*starting.*step 3 .*loss {last}  [0-9]+ tokens/s  exposed wait .*server-1 +gone: exit code 0",
            rf"job +\S job, completed .*steps +\S 3 in .*loss +\S {first} at first, {last} at last ",
        ):
            self.assertRegex(shown.decode(), re.compile(words, re.DOTALL))


class Codes(RealProcesses):
    def test_a_mistake_ends_with_2_and_who_is_no_cause_with_3(self) -> None:
        for how, code, of_ranks, words in (
            # The package finds it, or the session.
            ("mistake --at=0", 2, [2, 2], "rank 1, step 0: TypeError: "),
            ("turn", 2, [2, 2], "rank 1: step 7 was said to be done"),
            # Another attempt may go well.
            ("error", 3, [3, 1], "rank 1, step 1: ValueError: the loader broke"),
            ("code", 3, [3, 7], "rank 1, step 1: 0 of 2 forward phases"),
            # In a call that waits for the other rank. The shell says 128 and the signal.
            ("interrupt", 3, [130, 3], "KeyboardInterrupt; 0 of 0 restarts"),
        ):
            with self.subTest(how):
                found, said, out = self.run_job(shelled(*f"--how={how}".split()))
                self.assertEqual(found, code, said)
                # Who ends with 2 ends the run: the other one may be killed before it ends.
                self.assertIn(codes(out), (of_ranks, [2]) if code == 2 else (of_ranks,), said)
                self.assertIn(words, said)
                self.assertFalse((out / "gave-up").exists())
                if how.startswith("mistake"):
                    # It stays though no step was complete.
                    log = (out / "logs" / "trainer-1-0.log").read_text()
                    self.assertRegex(log, r'File ".*/ends_rank.py", line [0-9]+')

    def test_mistakes_before_a_rank_has_joined_end_with_2(self) -> None:
        def ended(script: str) -> subprocess.CompletedProcess:
            environment = os.environ | {"CADRE_CONTROL": "unix:/nowhere"}
            return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)

        def code(script: str) -> int:
            return ended(script).returncode

        shape = "cadre.Shape(2, 1, 8, ('causal',))"
        self.assertEqual(code(f"import cadre; cadre.init({shape}, steps=-1)"), 2)
        # The environment lacks what a job says.
        self.assertEqual(code(f"import cadre; cadre.init({shape}, steps=1)"), 2)
        # Errors of the script, of torch inside the package, and codes that the script chose stay.
        self.assertEqual(code("import cadre; raise ValueError('mine')"), 1)
        broken = "import cadre, torch; torch.get_num_threads = lambda: [][0]; cadre.init"
        self.assertEqual(code(f"{broken}({shape}, steps=1)"), 1)
        self.assertEqual(code(f"import cadre\ntry: cadre.init({shape}, steps=-1)\nexcept ValueError: exit(5)"), 5)
        # What libraries do when a process ends is done, though the code is not Python's.
        it = ended(f"{LIBRARY}\nimport atexit, cadre\natexit.register(print, 'and so')\ncadre.init({shape}, steps=-1)")
        self.assertEqual((it.returncode, it.stdout), (2, "and so\na library ends\n"), it.stderr)

    def test_a_resume_without_steps_ends_well_at_once(self) -> None:
        code, said, out = self.run_job(shelled("--steps=0"))
        self.assertEqual((code, codes(out)), (0, [0, 0]), said)
        logs = [it.read_text() for it in sorted(out.glob("logs/*trainer*"))]
        self.assertEqual(["no step is left to train; the job ends well" in it for it in logs], [True, True], logs)
        # Ranks that do not agree are told apart.
        code, said, out = self.run_job(shelled("--steps=0", "--more=1"))
        self.assertEqual(code, 2, said)
        self.assertRegex(said, "trainer [01] has [01] steps, trainer [01] ")

    def test_torchrun_hides_no_code_of_its_ranks(self) -> None:
        module = [sys.executable, "-m", "torch.distributed.run"]
        for options, nodes, code, ends in (
            # Before the ranks have joined.
            (("--steps=-1",), 1, 2, [2, 2]),
            (("--how=mistake",), 1, 2, [2, 2]),
            # The code of a node is that of the cause.
            (("--how=code",), 1, 3, [7, 7]),
            (("--how=code",), 2, 3, [3, 7]),
            # Of a rank that was killed nothing is known but what torchrun says.
            (("--how=death",), 1, 3, [1, 1]),
        ):
            with self.subTest(options=options, nodes=nodes):
                # By either name.
                program = module if nodes == 2 else "torchrun"
                text = manifest(*options, script=HERE / "ends_rank.py", program=program, nodes=nodes)
                found, said, out = self.run_job(text, "--json")
                self.assertEqual(found, code, said)
                told = [json.loads(it) for it in self.lines]
                told = {
                    it["index"]: it["how"] for it in told if it["event"] == "process_ended" and it["role"] == "trainer"
                }
                self.assertEqual([told[it] for it in sorted(told)], [f"exit code {it}" for it in ends], said)
                self.assertEqual(list(out.glob("logs/*.codes")), [])


class Signals(RealProcesses):
    def test_a_rank_that_is_asked_to_end_finishes_its_steps_and_saves(self) -> None:
        for rank in range(2):
            code, told, out = self.run_job(shelled("--how=stop", f"--rank={rank}", "--steps=1000"), "--json")
            self.assertEqual(code, 3, told)
            self.assertEqual(codes(out), [143 if it == rank else 0 for it in range(2)], told)
            (done, one), (other, two) = (json.loads((out / f"saved-{it}").read_text()) for it in range(2))
            self.assertEqual((done, one, two), (other, [0] * (rank == 0), [1] * (rank == 1)))
            # When rank 0 has heard of it, two steps at most are out.
            told = [json.loads(it) for it in self.lines]
            asked = f"trainer {rank} was asked to end: the job stops after the steps that are out"
            at = next(at for at, it in enumerate(told) if it.get("text") == asked)
            self.assertLessEqual(sum(it["event"] == "step" for it in told[at:]), 2, told)
            self.assertEqual(sum(it["event"] == "step" for it in told), done)
            # Also behind `finish`.
            self.assertIn(f"checkpoint of {done} steps is at somewhere", [it.get("text") for it in told])

    def test_a_rank_that_has_left_hears_sigterm_as_any_program(self) -> None:
        code, said, out = self.run_job(shelled("--how=after"))
        self.assertEqual((code, codes(out)), (0, [0, 143]), said)

    def test_a_rank_that_dies_by_a_signal_ends_the_others(self) -> None:
        code, said, out = self.run_job(shelled("--how=death", "--steps=1000"))
        self.assertEqual((code, codes(out)), (3, [3, 143]), said)

    def test_a_rank_that_is_killed_is_missed_at_once_though_workers_of_its_loader_live(self) -> None:
        # Nobody is missed for being silent: its links have to end, and its port to refuse others.
        code, said, out = self.run_job(patient(1000, "--how=forked", "--steps=1000").replace("10000", "1000"))
        self.assertEqual((code, codes(out)[0]), (3, 3), said)

    def test_a_rank_that_makes_no_call_is_named_while_the_job_waits(self) -> None:
        code, said, _ = self.run_job(patient(3, "--how=slow"))
        self.assertEqual(code, 0, said)
        self.assertRegex(said, "rank 1 has not submitted step 1, layer 0, nano-batch 0, forward for [0-9]+ s, and")
        # In the next step both are elsewhere for as long, and have said so.
        self.assertEqual(said.count("and others wait for it"), 1, said)


class Lost(RealProcesses):
    def test_without_a_server_the_job_does_as_it_says(self) -> None:
        for way in ("fwd", "bwd"):

            def run(loss: str, *more: str, way: str = way, **attention: object) -> tuple[int, str, Path]:
                text = shelled("--steps=4", servers=1, onPoolLoss=loss, **attention)
                return self.run_job(text, "--fault", f"kill-server:0@1:{way}", *more)

            with self.subTest(way=way):
                # One in its place would fill its slots if it came in the view that says that the other is gone.
                code, said, out = run("Fail", "--no-replace")
                self.assertEqual((code, codes(out)), (3, [3, 3]), said)
                # A server that is started in its place goes on, with the same bits; or nobody comes.
                code, said, out = run("Wait")
                self.assertEqual((code, codes(out)), (0, [0, 0]), said)
                whole = losses(out)
                code, said, out = run("Wait", "--no-replace", poolWaitSeconds=1)
                self.assertEqual((code, codes(out)), (3, [3, 3]), said)
                # The ranks compute.
                code, said, out = run("Local", "--no-replace")
                self.assertEqual((code, codes(out), losses(out)), (0, [0, 0], whole), said)


if __name__ == "__main__":
    unittest.main()
