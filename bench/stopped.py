#!/usr/bin/env python3
"""What a trainer that stops costs: seconds until its job goes on, and steps that are done again.

Usage: bench/stopped.py [--rounds N]

Runs a job of two trainers and two servers that may restart once, stops a trainer (SIGSTOP) after some steps, and waits:
until all trainers were started anew, until the first step after that is done, and until the job has ended. Once with
the conductor's trainer, once with the other. Writes target/bench/stopped.json beside the bars: the job goes on within
the suspicion and 20 s, and loses at most one interval of checkpoints. Exits with 1 if any run misses a bar. Everything
else goes to a temporary folder.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release" / "cadre"
RESULT = ROOT / "target" / "bench" / "stopped.json"
# Silence after which a trainer is dead, in seconds, as the manifest says; the bar is so much later.
SUSPICION = 5
BAR = SUSPICION + 20
# Steps between two checkpoints: what `cadre train` does by default.
INTERVAL = 20
STOP_AFTER = 30
STEPS = 60
WITHIN = 300

MANIFEST = f"""
apiVersion: cadre.dev/v1alpha1
kind: AttentionPool
metadata: {{name: pool}}
spec:
  replicas: 2
  template: {{spec: {{containers: [{{name: server, command: [cadre, serve]}}]}}}}
---
apiVersion: cadre.dev/v1alpha1
kind: TrainingJob
metadata: {{name: stopped}}
spec:
  nodes: 2
  failurePolicy: {{maxRestarts: 1, suspectAfterSeconds: {SUSPICION}}}
  attention: {{poolRef: {{name: pool}}, wire: F32, reproducible: true, onPoolLoss: Wait, poolWaitSeconds: 30}}
  template:
    spec:
      containers:
        - name: trainer
          command: [cadre, train]
          args: [--data={ROOT / "examples" / "bible"}, --model=tiny, --steps={STEPS}, --tokens=1024]
"""


class RunError(Exception):
    """The job did not do what it should."""


def processes(out: Path) -> list[dict]:
    try:
        return json.loads((out / "processes.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return []


def trainers(out: Path, life: int) -> dict[int, int]:
    """Process numbers of the trainers that were started for the `life`-th time, counted from 0."""
    its = [it for it in processes(out) if it["role"] == "trainer" and it["incarnation"] == life]
    return {it["index"]: it["pid"] for it in its}


def done(out: Path) -> int:
    try:
        return len((out / "steps.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def kept(out: Path) -> int:
    """Steps in the newest checkpoint."""
    names = [it.name for it in (out / "checkpoints").glob("step-*")]
    return max((int(it.removeprefix("step-")) for it in names), default=0)


def wait(what: str, child: subprocess.Popen, holds) -> None:
    until = time.monotonic() + WITHIN
    while not holds():
        if child.poll() is not None:
            raise RunError(f"the job ended with exit code {child.returncode} before {what}")
        if time.monotonic() > until:
            raise RunError(f"no {what} within {WITHIN} s")
        time.sleep(0.01)


def stop(victim: int, folder: Path) -> dict[str, float]:
    """Stops a trainer of one run."""
    out, manifest = folder / "out", folder / "job.yaml"
    manifest.write_text(MANIFEST)
    with (folder / "output").open("wb") as output:
        command = [str(PROGRAM), "run", "-f", str(manifest), "--json", "--out", str(out)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        wait("the steps before the stop", child, lambda: done(out) >= STOP_AFTER)
        os.kill(trainers(out, 0)[victim], signal.SIGSTOP)
        began, steps = time.monotonic(), done(out)
        wait("a restart", child, lambda: len(trainers(out, 1)) == 2)
        restarted, again = time.monotonic(), kept(out)
        wait("a step after the restart", child, lambda: done(out) > max(steps, again))
        went_on = time.monotonic()
        if child.wait(WITHIN) != 0:
            raise RunError(f"the job ended with exit code {child.returncode}")
    finally:
        child.kill()
        child.wait()
    return {
        "seconds until its trainers are started anew": restarted - began,
        "seconds until it is further than before": went_on - began,
        "steps done again": max(steps - again, 0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="what a trainer that stops costs")
    parser.add_argument("--rounds", type=int, default=3, help="runs for each trainer (default 3)")
    options = parser.parse_args()
    if not PROGRAM.exists():
        print("error: target/release/cadre is missing; run `make build`", file=sys.stderr)
        return 2
    bars = {"seconds until its trainers are started anew": BAR, "steps done again": INTERVAL}
    result, missed = [], []
    for victim, name in ((1, "a trainer"), (0, "the conductor's trainer")):
        runs = []
        try:
            for _ in range(max(options.rounds, 1)):
                with tempfile.TemporaryDirectory(prefix="cadre-bench-") as folder:
                    runs.append(stop(victim, Path(folder)))
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        for quantity in runs[0]:
            each = [it[quantity] for it in runs]
            ours, bar = statistics.median(each), bars.get(quantity)
            print(f"{name} stops: {quantity}: {ours:.1f} ({min(each):.1f} to {max(each):.1f}), bar {bar}")
            if bar is not None and max(each) > bar:
                missed.append(f"{name} stops: {quantity}: {max(each):.1f}, the bar is {bar}")
            result.append(
                {
                    "case": f"{name} stops after {STOP_AFTER} steps: {quantity}",
                    "ours": round(ours, 2),
                    "peer": bar,
                    "peer_name": None if bar is None else "the bar",
                    "unit": "s" if quantity.startswith("seconds") else "steps",
                    "ratio": None if bar is None or ours == 0 else round(bar / ours, 3),
                }
            )
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    for line in missed:
        print(f"error: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
