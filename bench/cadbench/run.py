#!/usr/bin/env python3
"""Runs planners over the cases, checks every plan, prints a table.

Usage: bench/cadbench/run.py [--planner NAME=COMMAND]… [--case TEXT] [--seed N] [--workloads FOLDER]
       bench/cadbench/run.py --write FOLDER        writes the cases as files, runs nothing
       bench/cadbench/run.py --check CASE PLAN     checks one plan, prints its score

README.md says what cases and plans look like. The exit code is 1 if a plan was refused.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

import cases as made
import planners
from check import RefusedError, Score, score, whole

ROOT = Path(__file__).resolve().parents[2]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--planner", action="append", default=[], metavar="NAME=COMMAND", help="{case}, {plan}: files")
    parser.add_argument("--cadre", type=Path, default=ROOT / "target/release/cadre", help="program of this repository")
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases whose name holds this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workloads", type=Path, help="folder of recorded workloads")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--check", nargs=2, type=Path, metavar=("CASE", "PLAN"))
    parser.add_argument("--out", type=Path, default=ROOT / "target/bench/cadbench.json")
    return parser.parse_args()


def known(options: argparse.Namespace) -> dict[str, planners.Planner]:
    found: dict[str, planners.Planner] = {"cadre": planners.cadre(options.cadre)}
    for it in options.planner:
        name, sep, command = it.partition("=")
        if not sep or "{plan}" not in command:
            sys.exit(f"--planner {it}: give NAME=COMMAND, with {{case}} and {{plan}} in the command")
        found[name] = planners.program(command)
    return found | {"published": planners.published, "poured": planners.poured, "at home": planners.at_home}


def row(name: str, seconds: float, it: Score) -> str:
    return (
        f"  {name:12} max/mean {it.max_over_mean:7.4f}   Q+KV {it.moved / 1e9:9.3f} GB   "
        f"busiest link {it.link_ms:9.2f} ms   memory {it.memory / 1e9:8.3f} GB   {it.tasks:7} tasks   {seconds:7.3f} s"
    )


def compared(of: list[dict], peer: str) -> str:
    """Geometric means of ours over a peer's, where both planned."""
    pairs = [(it["scores"]["cadre"], it["scores"][peer]) for it in of if {"cadre", peer} <= it["scores"].keys()]
    if not pairs:
        return f"{peer}: no case that both planned"

    def mean(field: str) -> str:
        logs = [math.log(ours[field] / other[field]) for ours, other in pairs if ours[field] and other[field]]
        return f"{math.exp(sum(logs) / len(logs)):.3f}" if logs else "none"

    lower = sum(ours["max_over_mean"] <= other["max_over_mean"] for ours, other in pairs)
    return (
        f"cadre over {peer} in {len(pairs)} cases: Q+KV x {mean('moved')}, busiest link x {mean('link_ms')}, "
        f"memory x {mean('memory')}, as even or more even in {lower}"
    )


def main() -> None:
    options = arguments()
    if options.check:
        try:
            case, plan = (json.loads(path.read_text()) for path in options.check)
            whole(case)
            print(json.dumps(asdict(score(case, plan))))
        except (RefusedError, OSError, ValueError) as error:
            sys.exit(f"refused: {error}")
        return
    chosen = [it for it in made.cases(options.seed, options.workloads) if options.case in it["name"]]
    if not chosen:
        sys.exit(f"no case is named {options.case!r}; --write lists all")
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        for at, it in enumerate(chosen):
            (options.write / f"{at:03}.json").write_text(json.dumps(it))
        print(f"{len(chosen)} cases in {options.write}")
        return
    results, refused, all_planners = [], 0, known(options)
    for case in chosen:
        print(case["name"], flush=True)
        result = {"case": case["name"], "scores": {}, "none": {}}
        for name, planner in all_planners.items():
            began = time.monotonic()
            try:
                plan = planner(case)
                seconds = time.monotonic() - began
                it = score(case, plan)
            except planners.NoPlanError as error:
                result["none"][name] = str(error)
                print(f"  {name:12} no plan: {error}")
            except RefusedError as error:
                refused += 1
                result["none"][name] = f"REFUSED: {error}"
                print(f"  {name:12} REFUSED: {error}")
            else:
                result["scores"][name] = asdict(it) | {"seconds": seconds}
                print(row(name, seconds, it), flush=True)
        results.append(result)
    for name in all_planners:
        if name != "cadre":
            print(compared(results, name))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(1 if refused else 0)


if __name__ == "__main__":
    main()
