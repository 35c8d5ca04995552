"""The report: rows as they come, a file that always holds all of them, the table.

In: rows, words. Out: gpu-check.json, and what is printed. The file is replaced whole, so a reader never sees half.
Measures and judges nothing.
"""

import json
import time
from pathlib import Path

LONG = "one document of 32896 rows"
LISTS = ("checks", "speeds", "rates", "left_out")
# Lines of the output of what failed; the file has more.
SHOWN = 12
# Longest pause between a row and its place in the file.
STORED_EVERY = 1.0


class Report:
    def __init__(self, path: Path, **facts: object) -> None:
        self.path, self.began, self.stored = path, time.monotonic(), 0.0
        self.content: dict = {**facts, "absent_peers": {}, **{name: [] for name in LISTS}}

    @staticmethod
    def read(path: Path) -> "Report":
        report = Report(path)
        report.content |= json.loads(path.read_text())
        return report

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        print(f"[{self.seconds():5.0f} s] {text}", flush=True)

    def add(self, to: str, row: dict) -> None:
        self.content[to].append(row)
        if not row.get("passed", True):
            self.say(f"  FAILED {row['check']}: {row['what']} {row['error']:.2e}")
            for line in row.get("tail", "").strip().splitlines()[-SHOWN:]:
                print(f"          | {line}", flush=True)
        if time.monotonic() - self.stored > STORED_EVERY:
            self.store()

    def check(self, name: str, what: str, passed: bool, **more: object) -> None:
        self.add("checks", {"check": name, "what": what, "error": float(not passed), "passed": passed, **more})

    def leave_out(self, name: str) -> None:
        self.say(f"{name}: LEFT OUT, no time is left")
        self.content["left_out"].append(name)

    def store(self) -> None:
        self.stored = time.monotonic()
        self.content["seconds"] = self.seconds()
        whole = self.path.with_suffix(".new")
        whole.write_text(json.dumps(self.content, indent=1) + "\n")
        whole.replace(self.path)

    def passed(self) -> bool:
        whole = bool(self.content["checks"]) and "stopped" not in self.content
        return whole and all(it["passed"] for it in self.content["checks"])

    def table(self) -> None:
        checks, speeds = self.content["checks"], self.content["speeds"]
        table_of_checks(checks)
        table_of_speeds(speeds)
        for it in self.content["rates"]:
            print(f"copies of rows, {it['case']}: {it['gigabytes']:.0f} GB/s, {it['ratio']:.2f} of the device's memcpy")
        for name, why in self.content["absent_peers"].items():
            print(f"peer {name} is not on this machine, so nothing is compared with it: {why}")
        if left_out := self.content["left_out"]:
            print(f"left out for want of time: {len(left_out)}: {'; '.join(left_out)}")
        if why := self.content.get("stopped"):
            print(why)


def table_of_checks(checks: list[dict]) -> None:
    failed = [it for it in checks if not it["passed"]]
    worst: dict[str, float] = {}
    for it in checks:
        worst[it["what"]] = max(worst.get(it["what"], 0.0), it["error"])
    print(f"\nchecks: {len(checks)}, failed: {len(failed)}")
    print("largest errors: " + ", ".join(f"{k} {worst[k]:.1e}" for k in ("O", "LSE", "dQ", "dK", "dV") if k in worst))
    for it in failed:
        print(f"FAILED {it['check']}: {it['what']}, {it['error']:.2e}")
    for why in sorted({it["hint"] for it in checks if "hint" in it}):
        print(f"  {why}")


def table_of_speeds(speeds: list[dict]) -> None:
    ours = [it for it in speeds if it["kernel"].startswith("Cadre")]
    if ours:
        print(
            f"\n{'case':<58} {'pass':<8} {'kernel':<18} {'ms':>9} {'TFLOP/s':>8} {'of mm':>6} {'ratio':>6} {'det.':>6}"
        )
    for it in ours:
        ratios = [f"{it[key]:6.2f}" if key in it else "     -" for key in ("ratio", "ratio_deterministic")]
        print(
            f"{it['case'][:58]:<58} {it['direction']:<8} {it['kernel']:<18} {it['seconds'] * 1e3:9.3f} "
            f"{it['tflops']:8.0f} {it['share_of_matmul']:6.2f} {' '.join(ratios)}"
        )
    for it in speeds:
        if "times_plain" in it:
            print(f"softcap, {it['case']}, {it['direction']}: {it['times_plain']:.2f} times the time without")
    for direction in ("forward", "backward"):
        found = {
            key: next((it["tflops"] for it in speeds if key in it["case"] and it["direction"] == direction), None)
            for key in ("tasks of 128 rows", LONG)
        }
        if all(found.values()):
            print(f"128-row tasks against {LONG}, {direction}: {found['tasks of 128 rows'] / found[LONG]:.2f}")
