"""Training runs of `cadre run` whose core attention is on the GPU: local, in place, and on two server processes.

In: the folder with the program and its data. Out: rows of a report. The first loss has the same bits wherever
attention is computed, since a forward row's bits depend on its document alone; later ones agree closely, since dK and
dV are summed as the plan cuts rows, and have the same bits when a run is repeated. A run on the CPU says what the
losses should be near. Linear layers of the trainer are on the GPU too (cuBLASLt). Rows go through the host, and in one
run of two servers stay on the GPU, with the same bits: these runs show that it works, not how fast it is.
"""

import json
import re
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sessions import Work, one

JSON = re.compile(r"\{.*\}$")


def losses(bits: list[str]) -> list[float]:
    return [struct.unpack(">f", bytes.fromhex(it.removeprefix("0x").rjust(8, "0")))[0] for it in bits]


class Runs:
    def __init__(self, folder: Path, steps: int, tokens: int, limit: float, environment: dict[str, str]) -> None:
        self.folder, self.steps, self.tokens, self.limit = folder, steps, tokens, limit
        self.environment = {**environment, "RUST_LOG": "info"}

    def run(self, name: str, end: float, engine: str, servers: int, *words: str) -> dict:
        """Losses as bits, seconds a step, or what went wrong; `end` is that of all."""
        text = (self.folder / "job.yaml").read_text()
        for key, value in [
            ("SERVERS", servers),
            ("IN_PLACE", "false" if servers else "true"),
            ("ENGINE", engine),
            ("DATA", self.folder / "data"),
            ("STEPS", self.steps),
            ("TOKENS", self.tokens),
        ]:
            text = text.replace(key, str(value))
        with tempfile.TemporaryDirectory() as out:
            job, stdout = Path(out) / "job.yaml", Path(out) / "stdout"
            job.write_text(text)
            command = [str(self.folder / "cadre"), "run", "-f", str(job), "--out", f"{out}/run", "--json", *words]
            done = one(Work(name, command, self.limit, stdout=stdout, environment=self.environment), end)
            logs = "".join(it.read_text(errors="replace") for it in sorted(Path(out).rglob("*.log")))
            printed = stdout.read_text(errors="replace") if stdout.exists() else ""
        if done.why:
            return {"failed": done.why, "tail": (done.output + logs)[-2000:], "out_of_time": done.out_of_time}
        steps = [it for it in map(json.loads, filter(JSON.match, printed.splitlines())) if it["event"] == "step"]
        if len(steps) != self.steps:
            return {"failed": f"{len(steps)} steps of {self.steps}", "tail": (done.output + logs)[-2000:]}
        return {
            "name": name,
            "bits": [it["loss_bits"] for it in steps],
            "seconds": min(it["seconds"] for it in steps),
            "on_gpu": "core attention" in logs and ": GPU " in logs and "linear layers: GPU" in logs,
        }


CPU, LOCAL, SERVERS = "CPU, in place", "GPU, --attention local", "GPU, two servers"
RUNS: dict[str, tuple] = {
    CPU: ("cpu", 0),
    LOCAL: ("gpu", 0, "--attention", "local"),
    "GPU, in place": ("gpu", 0),
    SERVERS: ("gpu", 2),
    "GPU, two servers again": ("gpu", 2),
    "GPU, two servers, rows stay there": ("gpu", 2, "--exchange", "node"),
}


def check(runs: Runs, end: float) -> Iterator[dict]:
    """Rows, one by one; {"left_out": …} where no time is left for a run."""
    past: dict[str, dict] = {}
    for name, how in RUNS.items():
        past[name] = it = runs.run(name, end, *how)
        row = {"check": f"cadre run, {name}, {runs.steps} steps"}
        if it.get("out_of_time"):
            yield {"left_out": row["check"]}
        elif "failed" in it:
            yield {**row, "what": it["failed"], "error": 1.0, "passed": False, "tail": it["tail"]}
        else:
            yield {**row, **compared(it, past)}


def compared(it: dict, past: dict[str, dict]) -> dict:
    """What a run is beside those before it."""
    cpu, local, servers = (past.get(name, it) for name in (CPU, LOCAL, SERVERS))
    on_cpu = it["name"] == CPU
    missing = [name for name in (CPU, LOCAL, SERVERS) if "failed" in past.get(name, {})]
    far = max(abs(a - b) for a, b in zip(losses(it["bits"]), losses(cpu.get("bits", it["bits"])), strict=True))
    first = on_cpu or "failed" in local or it["bits"][0] == local["bits"][0]
    # The run on two servers is in `past` only for those that repeat it.
    same = "failed" in servers or it["bits"] == servers["bits"]
    gpu = on_cpu or it["on_gpu"]
    what = f"loss {losses(it['bits'])[-1]:.5f}, {it['seconds']:.2f} s a step"
    what += "" if first else "; first loss has other bits than local's"
    what += "" if same else "; losses have other bits than those of the first run on two servers"
    what += "" if gpu else "; nothing ran on the GPU"
    what += f"; not compared, because that run failed: {', '.join(missing)}" if missing else ""
    # bf16 attention on another device: the loss of a few steps moves in the third digit.
    return {"what": what, "error": far, "passed": first and same and gpu and far <= 2e-2, "bits": it["bits"]}
