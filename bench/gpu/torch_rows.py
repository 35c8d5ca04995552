"""The package `cadre` with tensors of PyTorch on the GPU: attention by the GPU's kernels in one process, and jobs of
`cadre run` to which the same rows are handed on the GPU and on the host.

In: the folder with the package and the programs of its tests, as the pack's wheels have them. Out: rows of a report.
A rank runs each step twice, with tensors of the host and of the GPU, and ends the job where one bit differs: forward,
backward, f32 and bf16, with attention in place on the CPU, and on three servers of which two are killed; and bf16 with
attention in place on the GPU, where results are those of torch's own attention within bf16, too. Rows of a job go
through pinned memory. One job measures what a layer in place takes beside the kernels alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pack
from sessions import Ended, Work, one

RANKS = 2
# What runs in one process, and last words of it; the rank of a job; that which measures.
ALONE, SAME, RANK, BUBBLE = "local_gpu.py", "the same on both", "lent_rank.py", "bubble_rank.py"
FILES = (ALONE, RANK, BUBBLE, "gpu_memory.py", "refusals.py")
# The package's native half is built for all from this one on.
OLDEST = (3, 10)
SERVERS_DIE = ("--fault=kill-server:0@1:fwd", "--fault=kill-server:1@3:bwd")


@dataclass(frozen=True)
class Run:
    """Of a job: its ranks are Python with these words."""

    name: str
    words: tuple[str, ...]
    servers: int = 0
    ranks: int = RANKS
    wire: str = "F32"
    faults: tuple[str, ...] = ()
    measures: bool = False

    def manifest(self) -> str:
        """JSON is YAML."""

        def of(name: str, words: list[str]) -> dict:
            env = [{"name": "OMP_NUM_THREADS", "value": "2"}]
            return {"spec": {"containers": [{"name": name, "command": words[:2], "args": words[2:], "env": env}]}}

        common = {"apiVersion": "cadre.dev/v1alpha1", "metadata": {"name": "check"}}
        template = of("server", ["cadre", "serve", "--engine=cpu"])
        pool = {"replicas": self.servers, "inPlace": self.servers == 0, "template": template}
        job = {
            "nodes": self.ranks,
            "attention": {"poolRef": {"name": "check"}, "wire": self.wire, "onPoolLoss": "Fail", "reproducible": True},
            "template": of("trainer", [sys.executable, *self.words]),
        }
        both = [{**common, "kind": "AttentionPool", "spec": pool}, {**common, "kind": "TrainingJob", "spec": job}]
        return "\n---\n".join(map(json.dumps, both))


def runs(folder: Path, words: list[str]) -> list[Run]:
    rank = (str(folder / RANK), *words)
    return [
        Run("attention in place", rank),
        Run("attention in place on the GPU", (*rank, "--in-place"), wire="Bf16"),
        Run("three servers, two are killed", rank, servers=3, faults=SERVERS_DIE),
        Run("a layer in place", (str(folder / BUBBLE), *words), ranks=1, wire="Bf16", measures=True),
    ]


def check(folder: Path, limit: float, environment: dict[str, str], words: list[str], end: float) -> Iterator[dict]:
    """A row for each run; {"left_out": …} where no time is left for it."""
    # PyTorch may be found by what was there before.
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    more = {**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(folder / ALONE), *words]
    done = one(Work("tensors of PyTorch, in one process", command, limit, environment=more), end)
    yield row_of(done, SAME in done.output, "attention is that of the CPU within bf16", "it did not compare them")
    for run in runs(folder, words):
        with tempfile.TemporaryDirectory() as out:
            job = Path(out) / "job.yaml"
            job.write_text(run.manifest(), encoding="utf-8")
            command = [str(pack.program("cadre")), "run", "-f", str(job), "--out", f"{out}/run", *run.faults]
            done = one(Work(f"tensors of PyTorch, {run.name}", command, limit, environment=more), end)
            logs = "".join(it.read_text(errors="replace") for it in sorted(Path(out).rglob("*.log")))
        done.output += logs
        if run.measures:
            measured = re.search(r"^bubble: (.*)", logs, re.MULTILINE)
            yield row_of(done, measured is not None, measured[1] if measured else "", "it measured nothing")
            continue
        compared = logs.count("have the bits of the host")
        words_of = "results have the bits of the host's rows", f"{compared} of {run.ranks} compared"
        yield row_of(done, compared == run.ranks, *words_of)


def row_of(done: Ended, is_right: bool, right: str, wrong: str) -> dict:
    row = {"check": done.work.name}
    if done.out_of_time:
        return {"left_out": row["check"]}
    passed = is_right and not done.why
    what = right if passed else done.why or wrong
    tail = {} if passed else {"tail": done.output[-2000:]}
    return {**row, "what": f"{what}, {done.seconds:.0f} s", "error": 0.0, "passed": passed, **tail}
