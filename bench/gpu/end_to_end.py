"""Training runs of `cadre run` whose core attention is on the GPU: two jobs in place, beside local attention and the
CPU.

In: the folder with the program and its data. Out: rows of a report. The first job has servers beside attention in
place and loses one in the middle: its losses have the bits of the same run without the loss. The second has two
trainers that share their work in place: its time a step beside the same with local attention is the gain. The first
loss has the same bits wherever attention is computed, since a forward row's bits depend on its document alone; a run
on the CPU says what losses should be near. Linear layers of the trainer are on the GPU too (cuBLASLt). All processes
share one GPU, so the gain is that of balance alone, not of more processors.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pack
from sessions import Work, one

JSON = re.compile(r"\{.*\}$")


def losses(bits: list[str]) -> list[float]:
    return [struct.unpack(">f", bytes.fromhex(it.removeprefix("0x").rjust(8, "0")))[0] for it in bits]


class Runs:
    def __init__(
        self, folder: Path, steps: int, tokens: int, limit: float, environment: dict[str, str], trace: Path | None
    ) -> None:
        self.folder, self.steps, self.tokens, self.limit, self.trace = folder, steps, tokens, limit, trace
        # Processes would take turns at several GPUs; the check is about one.
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self.environment = {"CUDA_VISIBLE_DEVICES": first, **environment, "RUST_LOG": "info"}

    def run(self, name: str, end: float, engine: str, servers: int, trainers: int, *words: str, steps: int) -> dict:
        """Losses as bits, seconds of each step, or what went wrong; `end` is that of all."""
        text = (self.folder / "job.yaml").read_text(encoding="utf-8")
        for key, value in [
            ("SERVERS", servers),
            ("TRAINERS", trainers),
            ("ENGINE", engine),
            ("DATA", self.folder / "data"),
            ("STEPS", steps),
            ("TOKENS", self.tokens),
        ]:
            text = text.replace(key, str(value))
        with tempfile.TemporaryDirectory() as out:
            job, stdout = Path(out) / "job.yaml", Path(out) / "stdout"
            job.write_text(text)
            command = [str(pack.program("cadre")), "run", "-f", str(job), "--out", f"{out}/run", "--json", *words]
            if name == TRACED and self.trace:
                self.trace.unlink(missing_ok=True)
                command += ["--trace", str(self.trace)]
            done = one(Work(name, command, self.limit, stdout=stdout, environment=self.environment), end)
            logs = "".join(it.read_text(errors="replace") for it in sorted(Path(out).rglob("*.log")))
            printed = stdout.read_text(errors="replace") if stdout.exists() else ""
        if done.why:
            return {"failed": done.why, "tail": (done.output + logs)[-2000:], "out_of_time": done.out_of_time}
        told = [it for it in map(json.loads, filter(JSON.match, printed.splitlines())) if it["event"] == "step"]
        if len(told) != steps:
            return {"failed": f"{len(told)} steps of {steps}", "tail": (done.output + logs)[-2000:]}
        return {
            "name": name,
            "bits": [it["loss_bits"] for it in told],
            "seconds": [it["seconds"] for it in told],
            "on_gpu": "core attention" in logs and ": GPU " in logs and "linear layers: GPU" in logs,
        }


CPU = "CPU, in place"
WHOLE, LOST = "GPU, in place and two servers", "GPU, in place and two servers, one is killed"
LOCAL, SHARED = "GPU, two trainers, --attention local", "GPU, two trainers in place"
NODE = "GPU, in place and two servers, rows stay there"
TRACED = SHARED
# Factor on the steps of jobs whose times are compared.
LONGER = 2


def runs_of(steps: int) -> dict[str, tuple]:
    """What matters most first: engine, servers, trainers, words."""
    kill = f"--fault=kill-server@{steps // 2}"
    return {
        CPU: ("cpu", 0, 1),
        WHOLE: ("gpu", 2, 1),
        LOST: ("gpu", 2, 1, kill),
        LOCAL: ("gpu", 0, 2, "--attention", "local"),
        SHARED: ("gpu", 0, 2),
        NODE: ("gpu", 2, 1, "--exchange", "node"),
    }


def check(runs: Runs, end: float) -> Iterator[dict]:
    """Rows, one by one; {"left_out": …} where no time is left for a run, {"note": …} for what is no check."""
    past: dict[str, dict] = {}
    for name, words in runs_of(runs.steps).items():
        steps = runs.steps * (LONGER if name in (LOCAL, SHARED) else 1)
        past[name] = it = runs.run(name, end, *words, steps=steps)
        row = {"check": f"cadre run, {name}, {steps} steps"}
        if it.get("out_of_time"):
            yield {"left_out": row["check"]}
        elif "failed" in it:
            yield {**row, "what": it["failed"], "error": 1.0, "passed": False, "tail": it["tail"]}
        else:
            yield {**row, **compared(it, past)}
    times = [past.get(it, {}).get("seconds") for it in (LOCAL, SHARED)]
    if all(times):
        yield {"note": gain(*times)}


def gain(local: list[float], shared: list[float]) -> str:
    """Ratio of medians: the first steps warm up, and any step may be disturbed."""

    def spread(times: list[float]) -> float:
        ordered = sorted(times)
        return (ordered[len(ordered) * 3 // 4] - ordered[len(ordered) // 4]) / statistics.median(ordered)

    before, after = statistics.median(local), statistics.median(shared)
    found, far = before / after, max(spread(local), spread(shared))
    words = (
        f"two trainers in place: {after:.3f} s a step, local {before:.3f}: gain {found:.2f} (medians of {len(local)} "
    )
    words += f"steps, spread {far:.1%})"
    return f"{words}: undecided" if abs(found - 1) <= far else words


def compared(it: dict, past: dict[str, dict]) -> dict:
    """Compares a run with those before it."""
    name, on_cpu, cpu = it["name"], it["name"] == CPU, past.get(CPU, it)
    # Runs whose losses have the same bits: as many trainers, and sums in one order.
    same_as = {LOST: WHOLE, NODE: WHOLE}.get(name)
    first_as = {SHARED: LOCAL}.get(name)
    missing = [other for other in (CPU, same_as, first_as) if other and "failed" in past.get(other, {})]
    # Trainers that share their tokens differently have other losses.
    near = not (on_cpu or CPU in missing or name in (LOCAL, SHARED))
    far = max((abs(a - b) for a, b in zip(losses(it["bits"]), losses(cpu["bits"]))), default=0.0) if near else 0.0
    other, before = past.get(same_as or "", {}), past.get(first_as or "", {})
    same = "bits" not in other or it["bits"] == other["bits"]
    first = "bits" not in before or it["bits"][0] == before["bits"][0]
    gpu = on_cpu or it["on_gpu"]
    what = f"loss {losses(it['bits'])[-1]:.5f}, {statistics.median(it['seconds']):.3f} s a step"
    what += "" if same else f"; losses have other bits than those of: {same_as}"
    what += "" if first else f"; first loss has other bits than that of: {first_as}"
    what += "" if gpu else "; nothing ran on the GPU"
    what += f"; not compared, because that run failed: {', '.join(missing)}" if missing else ""
    # bf16 attention on another device: the loss of a few steps moves in the third digit.
    return {"what": what, "error": far, "passed": first and same and gpu and far <= 2e-2, "bits": it["bits"]}
