#!/usr/bin/env python3
"""Price of the pool on this machine: the sample job on two servers beside the same job with local attention.

Usage: bench/pool_price.py [--steps N] [--rounds N] [--no-shares]

Runs `cadre run -f examples/bible.yaml` (two trainers, two servers, one compute thread each) and the same command with
`--attention local`, one after the other, in alternating order, and writes target/bench/pool_price.json: median wall
seconds of the whole run, median CPU seconds of all its processes (user and system, from the kernel's accounts of ended
children), and the median of the steps' own seconds without the first. The peer is Cadre itself without the pool. Beside
the bar of 0.01: what part of the steps of the pool the worst trainer waits for their headers and plans. One more
run with --trace, not timed, prints where the time of trainers and servers goes. Everything it writes beside the result
goes to a temporary folder.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release" / "cadre"
RESULT = ROOT / "target" / "bench" / "pool_price.json"
MANIFEST = "examples/bible.yaml"
WAIT = "wait for header and plan, part of the steps"
WAIT_BAR = 0.01
MODES = {"pool": [], "local": ["--attention", "local"]}
# What a span of the trace is, by its name.
KINDS = {"linear": "compute", "launch": "compute", "doorbell": "copy", "pull": "copy", "wait": "wait"}


class RunError(Exception):
    """A run of cadre ended with another exit code than 0."""


def run_once(mode: str, steps: int, folder: Path, *more: str) -> tuple[float, float, list[dict]]:
    """Wall seconds, CPU seconds of the process tree, and what is said of each step."""
    out = folder / "out"
    command = [str(PROGRAM), "run", "-f", MANIFEST, "--json", "--steps", str(steps), "--out", str(out)]
    with (folder / "output").open("wb") as output:
        began = time.perf_counter()
        child = subprocess.Popen([*command, *MODES[mode], *more], cwd=ROOT, stdout=output, stderr=output)
        # wait4 accounts for the child and for every descendant that was itself waited for.
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        last = (folder / "output").read_text(errors="replace").splitlines()[-5:]
        raise RunError(f"cadre with attention {mode} ended with exit code {child.returncode}:\n" + "\n".join(last))
    lines = (out / "steps.jsonl").read_text().splitlines()
    return wall, usage.ru_utime + usage.ru_stime, [json.loads(line) for line in lines]


def measure(steps: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Samples by mode and quantity."""
    samples: dict[str, dict[str, list[float]]] = {mode: defaultdict(list) for mode in MODES}
    for number in range(rounds):
        order = list(MODES) if number % 2 == 0 else list(reversed(MODES))
        for mode in order:
            with tempfile.TemporaryDirectory(prefix="cadre-bench-") as folder:
                wall, cpu, each = run_once(mode, steps, Path(folder))
            samples[mode]["wall seconds"].append(wall)
            samples[mode]["CPU seconds"].append(cpu)
            # The first step waits for nothing before it.
            samples[mode]["seconds a step"].append(statistics.median(it["seconds"] for it in each[1:]))
            waits = sum(it["header_wait_seconds"] for it in each[1:])
            samples[mode][WAIT].append(waits / sum(it["seconds"] for it in each[1:]))
            print(f"  round {number} {mode:5}: wall {wall:.1f} s, CPU {cpu:.1f} s", flush=True)
    return samples


def print_shares(steps: int) -> None:
    """Where time goes, as shares of each role's processes; spans of one process may overlap (copy runs beside)."""
    with tempfile.TemporaryDirectory(prefix="cadre-bench-") as folder:
        trace = Path(folder) / "trace.json"
        run_once("pool", steps, Path(folder), "--trace", str(trace))
        content = json.loads(trace.read_text())
    events = content["traceEvents"] if isinstance(content, dict) else content
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    spans = [e for e in events if e.get("ph") == "X"]
    if not spans:
        print("  the trace holds no span")
        return
    length = max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans)
    by_role: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    processes: dict[str, set[int]] = defaultdict(set)
    for event in spans:
        role = names.get(event["pid"], "process").split()[0]
        processes[role].add(event["pid"])
        by_role[role][KINDS.get(event["name"], event["name"])] += event["dur"]
    for role in sorted(by_role):
        whole = length * len(processes[role])
        shares = ", ".join(f"{kind} {time / whole:.0%}" for kind, time in sorted(by_role[role].items()))
        print(f"  share of the time of each {role}: {shares}")


def main() -> int:
    parser = argparse.ArgumentParser(description="price of the pool on this machine")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (at least 2, default 12)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--no-shares", action="store_true", help="leave out the traced run")
    options = parser.parse_args()
    if not PROGRAM.exists():
        print("error: target/release/cadre is missing; run `make build`", file=sys.stderr)
        return 2
    try:
        samples = measure(max(options.steps, 2), max(options.rounds, 1))
        if not options.no_shares:
            print_shares(max(options.steps // 2, 2))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    result = []
    for quantity in samples["pool"]:
        ours = statistics.median(samples["pool"][quantity])
        peer = statistics.median(samples["local"][quantity])
        low, high = min(samples["pool"][quantity]), max(samples["pool"][quantity])
        case = f"bible, 2 trainers, 2 servers, {options.steps} steps: {quantity}"
        if quantity == WAIT:
            print(f"{quantity}: pool {ours:.4f} ({low:.4f} to {high:.4f}), local {peer:.4f}, bar {WAIT_BAR}")
            line = {"case": case, "ours": ours, "peer": WAIT_BAR, "peer_name": "the bar", "unit": ""}
            result.append({**line, "ratio": WAIT_BAR / ours if ours else None})
            continue
        print(f"{quantity}: pool {ours:.2f} ({low:.2f} to {high:.2f}), local {peer:.2f}, price {ours / peer:.3f}")
        result.append(
            {
                "case": case,
                "ours": ours,
                "peer": peer,
                "peer_name": "cadre run --attention local",
                "unit": "s",
                "ratio": peer / ours,
            }
        )
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
