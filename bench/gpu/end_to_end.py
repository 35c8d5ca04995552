"""Training runs of `cadre run` whose core attention is on the GPU: local, in place, and on two server processes.

In: the folder with the program and its data. Out: rows of a report. The first loss has the same bits wherever
attention is computed, since a forward row's bits depend on its document alone; later ones agree closely, since dK and
dV are summed as the plan cuts rows, and have the same bits when a run is repeated. A run on the CPU says what the
losses should be near. Linear layers of the trainer are on the GPU too (cuBLASLt). Rows go through the host, and in one
run of two servers stay on the GPU, with the same bits: these runs show that it works, not how fast it is.
"""

import json
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


def losses(bits: list[str]) -> list[float]:
    return [struct.unpack(">f", bytes.fromhex(it.removeprefix("0x").rjust(8, "0")))[0] for it in bits]


class Runs:
    def __init__(self, folder: Path, steps: int, tokens: int, seconds: float) -> None:
        self.folder, self.steps, self.tokens, self.seconds = folder, steps, tokens, seconds

    def run(self, name: str, engine: str, servers: int, *words: str) -> dict:
        """Losses as bits, seconds a step, or what went wrong."""
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
            job = Path(out) / "job.yaml"
            job.write_text(text)
            command = [str(self.folder / "cadre"), "run", "-f", str(job), "--out", f"{out}/run", "--json", *words]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=self.seconds,
                    check=False,
                    env={**os.environ, "RUST_LOG": "info"},
                )
            except subprocess.TimeoutExpired:
                return {"name": name, "failed": f"no end after {self.seconds} s"}
            logs = "".join(it.read_text(errors="replace") for it in Path(out).rglob("*.log"))
        lines = [json.loads(it) for it in done.stdout.splitlines() if it.startswith("{")]
        steps = [it for it in lines if it["event"] == "step"]
        if done.returncode != 0 or len(steps) != self.steps:
            return {"name": name, "failed": f"exit {done.returncode}: {(done.stderr + logs)[-1500:]}"}
        return {
            "name": name,
            "bits": [it["loss_bits"] for it in steps],
            "seconds": min(it["seconds"] for it in steps),
            "on_gpu": "core attention" in logs and ": GPU " in logs and "linear layers: GPU" in logs,
        }


def check(folder: Path, steps: int, tokens: int, seconds: float) -> Iterator[dict]:
    runs = Runs(folder, steps, tokens, seconds)
    cpu = runs.run("CPU, in place", "cpu", 0)
    local = runs.run("GPU, --attention local", "gpu", 0, "--attention", "local")
    servers = runs.run("GPU, two servers", "gpu", 2)
    again = runs.run("GPU, two servers again", "gpu", 2)
    node = runs.run("GPU, two servers, rows stay there", "gpu", 2, "--exchange", "node")
    for it in (cpu, local, runs.run("GPU, in place", "gpu", 0), servers, again, node):
        row = {"check": f"cadre run, {it['name']}, {steps} steps"}
        if "failed" in it or "failed" in local or "failed" in cpu:
            why = it.get("failed", "compared with a run that failed")
            yield {**row, "what": why, "error": float("nan"), "passed": False}
            continue
        far = max(abs(a - b) for a, b in zip(losses(it["bits"]), losses(cpu["bits"]), strict=True))
        first = it["name"].startswith("CPU") or it["bits"][0] == local["bits"][0]
        same = (it is not again and it is not node) or it["bits"] == servers.get("bits")
        gpu = it["name"].startswith("CPU") or it["on_gpu"]
        what = f"loss {losses(it['bits'])[-1]:.5f}, {it['seconds']:.2f} s a step"
        what += "" if first else "; first loss has other bits than local's"
        what += "" if same else "; losses have other bits than those of the first run on two servers"
        what += "" if gpu else "; nothing ran on the GPU"
        # bf16 attention on another device: the loss of a few steps moves in the third digit.
        yield {**row, "what": what, "error": far, "passed": first and same and gpu and far <= 2e-2, "bits": it["bits"]}
