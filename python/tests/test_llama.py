"""The Llama of `make demo-pytorch`, 20 steps: the same losses whatever becomes of servers, in other pools, in attempts.

In: the folder of the programs as CADRE_PROGRAMS. Two ranks of one torchrun, documents that go on in the next rank.
"""

import json
import re
import subprocess
import unittest
from pathlib import Path

import cadre
import test_pool
import torch
from pytorch_books import documents
from pytorch_models import llama
from test_pool import EXAMPLES, RealProcesses, losses, number

STEPS, TOKENS = 20, 256


def job(*options: str, servers: int = 4, in_place: bool = False, command: str = "torchrun", restarts: int = 0) -> str:
    """That of the demo, on another pool. Four servers: two may be lost at once."""
    text = (EXAMPLES / "pytorch.yaml").read_text()
    for old, new in (
        ("[--steps=30, --tokens=2048]", json.dumps([f"--steps={STEPS}", f"--tokens={TOKENS}", *options])),
        ("replicas: 2", f"replicas: {servers}"),
        ("inPlace: false", f"inPlace: {str(in_place).lower()}"),
        ("procsPerNode: 2", f"procsPerNode: 2\n  failurePolicy: {{maxRestarts: {restarts}}}"),
        ("[torchrun,", f"[{command},"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def steps(out: Path) -> list[dict]:
    return [json.loads(it) for it in (out / "steps.jsonl").read_text().splitlines()]


class Llama(RealProcesses):
    calm: list[str]

    @classmethod
    def setUpClass(cls) -> None:
        """The run that the others are compared with."""
        case = cls()
        case.setUp()
        cls.addClassCleanup(case.doCleanups)
        cls.calm = losses(case.complete(job()))

    def faulty(self, *faults: str, more: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> list[int]:
        """In how many ways each step lost servers; its losses are those of the calm run."""
        ordered = [word for it in faults for word in ("--fault", it)]
        out = self.complete(job(*options), *ordered, *more)
        self.assertEqual(losses(out), self.calm)
        return [it["failovers"] for it in steps(out)]

    def test_losses_have_the_same_bits_whatever_server_dies(self) -> None:
        self.assertEqual(len(self.calm), STEPS)
        # Transformers' own attention, whole documents in this process: another order of sums.
        with torch.no_grad():
            whole = cadre.pack(documents(0, 2 * TOKENS), rank=0, ranks=1)
            first = float(llama("sdpa")(**whole.inputs()).loss)
        self.assertLess(abs(first - number(self.calm[0])) / first, 1e-6)
        # Slots stay vacant for the rest of the job.
        lost = self.faulty("kill-server:0@3:fwd", "kill-server:1@6:bwd", more=("--no-replace",))
        self.assertEqual([at for at, it in enumerate(lost) if it], [3, 6])
        # Two at once, in both directions, and one that is stopped; layers are computed again.
        two = [f"kill-server:{it}@{at}" for at, these in (("3:fwd", (0, 1)), ("9:bwd", (2, 3))) for it in these]
        lost = self.faulty(*two, "stop-server:0@16:fwd", options=("--checkpointing",))
        self.assertGreaterEqual(sum(it > 0 for it in lost), 3)
        self.assertTrue(lost[3] and lost[9] and lost[16], lost)

    def test_another_pool_learns_the_same(self) -> None:
        # Ranks compute in place, each with two threads. What is written is that of any job.
        text, out, trace = job("--threads=2", servers=1, in_place=True), self.folder / "run", self.folder / "trace.json"
        (self.folder / "job.yaml").write_text(text)
        command = [test_pool.PROGRAM, "run", "-f", self.folder / "job.yaml", "--out", out, "--json", "--trace", trace]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=test_pool.ROOT, timeout=600)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        for one, other in zip(losses(out), self.calm, strict=True):
            self.assertLess(abs(number(one) - number(other)) / number(other), 1e-4)
        told = [json.loads(it) for it in ended.stdout.splitlines()]
        self.assertEqual([it["loss_bits"] for it in told if it["event"] == "step"], losses(out))
        self.assertEqual([told[-1][it] for it in ("event", "outcome", "steps")], ["summary", "completed", STEPS])
        rows = [json.loads(it) for it in (out / "servers.jsonl").read_text().splitlines()]
        self.assertEqual(len({it["server"] for it in rows}), 3, rows[0])
        spans = json.loads(trace.read_text())["traceEvents"]
        self.assertEqual(len({it["pid"] for it in spans if it["ph"] == "X"}), 3)

    def test_attempts_go_on_from_the_scripts_checkpoint_as_if_there_had_been_one(self) -> None:
        count = 8
        options = (f"--steps={count}", "--save-every=1", f"--checkpoints={self.folder / 'saved'}")
        # Steps count from 0 in each attempt. One restart in a row is allowed, and there are two.
        faults = ("--fault", "kill-trainer:1@2", "--fault", "kill-trainer:0@3")
        out = self.complete(job(*options, command="python", restarts=1), *faults)
        self.assertLess(len(losses(out)), count - 2)
        self.assertEqual(losses(out), self.calm[:count][-len(losses(out)) :])
        # A rank that dies between a step and its checkpoint computes it again.
        said = "".join(it.read_text() for it in sorted(out.glob("logs/trainer-0*")))
        steps = [int(it[1]) for it in re.finditer(r"^step (\d+) loss", said, re.MULTILINE)]
        self.assertEqual(sorted(set(steps)), list(range(1, count + 1)), said)
        # One more has nothing left to do.
        out = self.complete(job(*options))
        self.assertIn("no step is left to train; the job ends well", (out / "logs" / "trainer-0-0.log").read_text())


if __name__ == "__main__":
    unittest.main()
