"""The report: rows as they come, a file that always holds all of them, and a summary that fits where output is cut.

In: rows, words. Out: gpu-check.json, and what is printed. Each row carries where its numbers are from (commit,
digests of the kernels, GPU, driver, clocks, …). The file is replaced whole, so a reader never sees half; a folder
that takes no more costs the file, not the run, and so does a reader of what is printed that has gone. Judges nothing;
causes.py says which failures have one cause.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import causes
import decisions
import machine

LONG = "one document of 32896 rows"
LISTS = ("checks", "speeds", "forms", "rates", "left_out", "not_run", "notes")
# Lists whose rows say where they are from.
MEASURED = ("checks", "speeds", "forms", "rates")
# Names of what was not run for one reason.
NAMED = 12
# Lines of the output of what failed; the file has more.
SHOWN = 6
# Longest pause between a row and its place in the file.
STORED_EVERY = 1.0
# Characters of the summary: whoever runs this may see the last 12,000 of all that is printed.
SUMMARY = 11_000
# Of them for failures, which come last.
FAILURES = 6_000
# Characters of the failures so far, behind each stage: of a run that is cut, they are the end.
SO_FAR = 2_500
# Facts that every row carries, where they are known.
ORIGIN = ("commit", "dirty", "cubins", "device", "uuid", "driver", "cudnn", "torch", "power_limit_w", "clocks", "date")
# Exit code of a run whose only flaw is what no time was left for.
TIME = 4
# An error that is no number.
NO_NUMBER = 1e30


class Report:
    def __init__(self, path: Path, **facts: object) -> None:
        self.path, self.began, self.stored = path, time.monotonic(), 0.0
        self.content: dict = {**facts, "absent_peers": {}, "kernels": {}, **{name: [] for name in LISTS}}
        self.clocks: Callable[[], dict] = dict  # what the GPU runs at now
        self.card: Callable[[], dict] = dict  # what is known of it by now
        self.unwritable, self.told = "", 0

    @staticmethod
    def read(path: Path) -> Report:
        report = Report(path)
        report.content |= json.loads(path.read_text())
        return report

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        tell(f"[{self.seconds():5.0f} s] {text}")

    def origin(self) -> dict:
        if "power_limit_w" not in self.content:
            self.content.pop("clocks", None)
            self.content |= self.card()
        known = {key: self.content[key] for key in ORIGIN if key in self.content}
        return known | self.clocks()

    def add(self, to: str, row: dict) -> None:
        if to in MEASURED:
            # JSON has no word for what is no number.
            row = {key: it for key, it in row.items() if not isinstance(it, float) or math.isfinite(it)}
            row = ({"error": NO_NUMBER} if to == "checks" else {}) | row | {"provenance": self.origin()}
        self.content[to].append(row)
        if not row.get("passed", True):
            error = f" {row['error']:.2e}" if row["error"] != 1.0 else ""
            self.say(f"  FAILED {row['check']}: {row['what']}{error}")
            for line in row.get("tail", "").strip().splitlines()[-SHOWN:]:
                tell(f"          | {line[:300]}")
        if time.monotonic() - self.stored > STORED_EVERY:
            self.store()

    def check(self, name: str, what: str, passed: bool, **more: object) -> None:
        self.add("checks", {"check": name, "what": what, "error": float(not passed), "passed": passed, **more})

    def leave_out(self, name: str) -> None:
        self.say(f"{name}: LEFT OUT, no time is left")
        self.content["left_out"].append(name)

    def not_run(self, name: str, why: str) -> None:
        self.say(f"{name}: not run, {why}")
        self.content["not_run"].append({"name": name, "why": why})

    def note(self, text: str) -> None:
        """Something that is no failure, and that the summary says again."""
        self.say(f"  {text}")
        self.content["notes"].append(text)

    def store(self) -> None:
        self.stored = time.monotonic()
        self.content["seconds"] = self.seconds()
        whole = self.path.with_name(f".{self.path.name}.new")
        try:
            whole.write_text(json.dumps(self.content, indent=1) + "\n")
            whole.replace(self.path)
            self.unwritable = ""
        except OSError as why:
            if not self.unwritable:
                self.say(f"  {self.path} cannot be written: {why.strerror}; what is printed is all that comes back")
            self.unwritable = str(why.strerror)
            # Bytes of the file so far may be the room that the whole one lacks.
            with contextlib.suppress(OSError):
                whole.unlink()

    def failed(self) -> list[dict]:
        return [it for it in self.content["checks"] if not it["passed"]]

    def passed(self) -> bool:
        return self.verdict() == 0

    def verdict(self) -> int:
        """The exit code: 0 if all checks passed, TIME if what was run did and more was left out, else 1."""
        whole = bool(self.content["checks"]) and "stopped" not in self.content and not self.unwritable
        if not whole or self.failed():
            return 1
        return TIME if self.content["left_out"] else 0

    def so_far(self) -> None:
        """Failures behind a stage, if there are new ones."""
        if len(self.failed()) > self.told:
            self.told = len(self.failed())
            tell("so far:\n" + "\n".join(fit(causes.told(self.failed(), self.content), SO_FAR)))

    def table(self) -> None:
        """The summary, at most SUMMARY characters, failures and the verdict last."""
        last = fit(self.failures(), FAILURES)
        room = SUMMARY - sum(len(it) + 1 for it in last)
        for section in self.sections():
            # What comes first may take half of what is left.
            lines = fit(section, max(room // 2, 400))
            room -= sum(len(it) + 1 for it in lines)
            if lines:
                tell("\n".join(lines))
        tell("\n".join(last))

    def sections(self) -> list[list[str]]:
        content = self.content
        where = [f"{key} {content[key]}" for key in ORIGIN if key in content]
        head = ["", "summary: " + ", ".join(where)]
        most = str(content.get("max_sm_mhz", ""))
        head += filter(None, [machine.held_down([*content["speeds"], *content["forms"]], most)])
        if any(it["error"] < 1 for it in content["checks"]):
            head.append(largest_errors(content["checks"]))
        rates = [
            f"copies of rows, {it['case']}: {it['gigabytes']:.0f} GB/s, {it['ratio']:.2f} of the device's memcpy"
            for it in content["rates"]
        ]
        other = [f"peer {name} is not compared with: {why}" for name, why in content["absent_peers"].items()]
        other += [f"note: {it}" for it in content["notes"]]
        reasons: dict[str, list[str]] = {}
        for it in content["not_run"]:
            reasons.setdefault(it["why"], []).append(it["name"])
        for why, those in reasons.items():
            more = f"; {len(those) - NAMED} more" if len(those) > NAMED else ""
            other.append(f"not run: {'; '.join(those[:NAMED])}{more}: {why}")
        if left_out := content["left_out"]:
            other.append(f"left out for want of time: {len(left_out)}: {'; '.join(left_out)}")
        return [head, decisions.told(content), table_of_speeds(content["speeds"]), rates, other]

    def failures(self) -> list[str]:
        checks, failed = self.content["checks"], self.failed()
        lines = ["", *causes.told(failed, self.content)] if failed else [""]
        lines.append(f"checks: {len(checks)}, failed: {len(failed)}")
        if why := self.content.get("refused"):
            lines.append(f"NOTHING WAS RUN on a GPU: {why}")
        if why := self.content.get("stopped"):
            lines.append(why)
        if self.unwritable:
            lines.append(f"{self.path.name} is not whole: {self.unwritable}")
        return lines


def tell(text: str) -> None:
    """Prints, if anybody still reads."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115


def fit(lines: list[str], most: int) -> list[str]:
    """The first and the last lines of more than `most` characters, and how many are between."""
    if sum(len(it) + 1 for it in lines) <= most:
        return lines
    head, tail, room = [], [], most - 60
    for kept, share, left in ((head, 2 / 3, list(lines)), (tail, 1, lines[::-1])):
        while len(head) + len(tail) < len(lines) and room > most * (1 - share):
            kept.append(left[len(kept)][:1000])
            room -= len(kept[-1]) + 1
        if room < 0:
            room += len(kept.pop()) + 1
    dropped = len(lines) - len(head) - len(tail)
    return [*head, f"… {dropped} more lines: gpu-check.json has them …", *tail[::-1]]


def largest_errors(checks: list[dict]) -> str:
    worst: dict[str, float] = {}
    for it in checks:
        worst[it["what"]] = max(worst.get(it["what"], 0.0), it["error"])
    return "largest errors: " + ", ".join(f"{k} {worst[k]:.1e}" for k in ("O", "LSE", "dQ", "dK", "dV") if k in worst)


def ratio(row: dict, key: str = "ratio") -> str:
    """With a mark where it is nearer to 1 than its spread."""
    if key not in row:
        return "-"
    return f"{'~' * (abs(row[key] - 1) <= row.get(f'{key}_spread', 0))}{row[key]:.2f}"


def table_of_speeds(speeds: list[dict]) -> list[str]:
    ours = [it for it in speeds if it["kernel"].startswith("Cadre")]
    lines = []
    if ours:
        lines.append(
            f"{'case':<46} {'pass':<4} {'kernel':<13} {'L2':<4} {'ms':>8} {'spread':>6} {'TFLOP/s':>7} {'of mm':>5} "
            f"{'ratio':>5} {'det.':>5}"
        )
    for it in ours:
        ratios = " ".join(f"{ratio(it, key):>5}" for key in ("ratio", "ratio_deterministic"))
        by_host = "" if it.get("without_host", True) else " h"
        lines.append(
            f"{it['case'][:46]:<46} {it['direction'][:4]:<4} {it['kernel'].removeprefix('Cadre').strip()[:13]:<13} "
            f"{it.get('l2', '-'):<4} {it['seconds'] * 1e3:8.3f} {it.get('spread', 0):6.1%} {it['tflops']:7.0f} "
            f"{it.get('share_of_matmul', 0):5.2f} {ratios}{by_host}"
        )
    marks = {
        "~": "by less than the spread of both times, which decides nothing",
        "h": "with the host's work between runs",
    }
    found = [f"{mark}: {words}" for mark, words in marks.items() if any(mark in it[-14:] for it in lines[1:])]
    lines += ["; ".join(found)] if found else []
    for it in speeds:
        if "times_plain" in it:
            lines.append(f"softcap, {it['case']}, {it['direction']}: {it['times_plain']:.2f} times the time without")
    for direction in ("forward", "backward"):
        found = {
            key: next((it["tflops"] for it in speeds if key in it["case"] and it["direction"] == direction), None)
            for key in ("tasks of 128 rows", LONG)
        }
        if all(found.values()):
            share = found["tasks of 128 rows"] / found[LONG]
            lines.append(f"128-row tasks against {LONG}, {direction}: {share:.2f}")
    return lines
