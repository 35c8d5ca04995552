"""The package `cadre` with tensors of PyTorch on the GPU: attention by the GPU's kernels in one process, and jobs of
`cadre run` to which the same rows are handed on the GPU and on the host.

In: the folder with the package and the programs of its tests, as the pack's wheels have them. Out: rows of a report.
A rank runs each step twice, with tensors of the host and of the GPU, and ends the job where one bit differs: forward,
backward, f32 and bf16, with attention in place, and on three servers of which two are killed. Rows of a job go through
pinned memory and are computed on the CPU here: what is checked is lending, and no kernel. It measures nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pack
from sessions import Ended, Work, one

RANKS = 2
# What runs in one process, and last words of it; the rank of a job.
ALONE, SAME, RANK = "local_gpu.py", "the same on both", "lent_rank.py"
FILES = (ALONE, RANK, "gpu_memory.py", "refusals.py")
# The package's native half is built for all from this one on.
OLDEST = (3, 10)
RUNS = {
    "attention in place": (0,),
    "three servers, two are killed": (3, "--fault=kill-server:0@1:fwd", "--fault=kill-server:1@3:bwd"),
}


def manifest(servers: int, command: list[str]) -> str:
    """JSON is YAML."""

    def of(name: str, words: list[str]) -> dict:
        env = [{"name": "OMP_NUM_THREADS", "value": "2"}]
        return {"spec": {"containers": [{"name": name, "command": words[:2], "args": words[2:], "env": env}]}}

    common = {"apiVersion": "cadre.dev/v1alpha1", "metadata": {"name": "check"}}
    pool = {"replicas": servers, "inPlace": servers == 0, "template": of("server", ["cadre", "serve", "--engine=cpu"])}
    job = {
        "nodes": RANKS,
        "attention": {"poolRef": {"name": "check"}, "wire": "F32", "onPoolLoss": "Fail"},
        "template": of("trainer", command),
    }
    both = [{**common, "kind": "AttentionPool", "spec": pool}, {**common, "kind": "TrainingJob", "spec": job}]
    return "\n---\n".join(map(json.dumps, both))


def check(folder: Path, limit: float, environment: dict[str, str], words: list[str], end: float) -> Iterator[dict]:
    """A row for each run; {"left_out": …} where no time is left for it."""
    # PyTorch may be found by what was there before.
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    more = {**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(folder / ALONE), *words]
    done = one(Work("tensors of PyTorch, in one process", command, limit, environment=more), end)
    yield row_of(done, SAME in done.output, "attention is that of the CPU within bf16", "it did not compare them")
    for name, (servers, *faults) in RUNS.items():
        with tempfile.TemporaryDirectory() as out:
            job = Path(out) / "job.yaml"
            job.write_text(manifest(servers, [sys.executable, str(folder / RANK), *words]), encoding="utf-8")
            command = [str(pack.program("cadre")), "run", "-f", str(job), "--out", f"{out}/run", *faults]
            done = one(Work(f"tensors of PyTorch, {name}", command, limit, environment=more), end)
            logs = "".join(it.read_text(errors="replace") for it in sorted(Path(out).rglob("*.log")))
        done.output += logs
        compared = logs.count("have the bits of the host")
        words_of = "results have the bits of the host's rows", f"{compared} of {RANKS} compared"
        yield row_of(done, compared == RANKS, *words_of)


def row_of(done: Ended, is_right: bool, right: str, wrong: str) -> dict:
    row = {"check": done.work.name}
    if done.out_of_time:
        return {"left_out": row["check"]}
    passed = is_right and not done.why
    what = right if passed else done.why or wrong
    tail = {} if passed else {"tail": done.output[-2000:]}
    return {**row, "what": f"{what}, {done.seconds:.0f} s", "error": 0.0, "passed": passed, **tail}
