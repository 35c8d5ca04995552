"""What is found out about a kernel that is wrong, hangs or faults: the same again, looked at closely.

In: failed rows, which say who found it; cadre-gpu-probe, forms of the kernels, the emulated driver, the machine's
tools. Out: `diagnosis` of the report, lines a kernel. What the smoke test found is asked of the probe again; what only
larger shapes show, of the unit of the part that found it.

hang    with kernels that tell where their warps wait, and trap
fault   under compute-sanitizer, which names address and instruction; else by a core dump that cuda-gdb reads
wrong   over the emulated driver with the same inputs: what the element is there, of each table that is wrong
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import keep
import machine
import pack
from parts import FORMS, Parts
from report import Report
from sessions import Ended, Work, one
from smoke import PROBE

HERE = Path(__file__).resolve().parent
# Maximum kernels that are diagnosed: kernels with the same cause add nothing.
DIAGNOSED = 4
# Tables of a wrong kernel that the emulated GPU is asked for.
TABLES = 3
# Maximum lines about where warps wait.
PLACES = 12
SANITIZER_FOUND = 9
# How the emulated driver calls its GPU.
EMULATED = "emulated"
ORDER = ["hang", "fault", "wrong", "right"]


class Diagnosis:
    def __init__(self, report: Report, parts: Parts, work: Path, environment: Callable[[], dict[str, str]]) -> None:
        self.report, self.parts, self.work, self.environment = report, parts, work, environment

    def run(self, end: float) -> None:
        kernels = self.report.content["kernels"]
        found = self.report.content.setdefault("diagnosis", {})
        broken = [it for it in kernels.items() if it[1] != "right" and it[0] not in found]
        broken.sort(key=lambda it: ORDER.index(it[1]))
        for kernel, how in broken[: max(0, DIAGNOSED - len(found))]:
            self.report.say(f"{kernel}: {how}, diagnosed")
            asked = {"hang": self.hang, "fault": self.fault, "wrong": self.wrong}[how]
            found[kernel] = asked(kernel, end)
            for line in found[kernel]:
                self.report.say(f"  {line}")
            self.report.store()
        if left := [it for it in broken if it[0] not in found]:
            names = ", ".join(f"{kernel} ({how})" for kernel, how in left)
            words = f"not diagnosed, as {DIAGNOSED} kernels were: {names}"
            if words not in self.report.content["notes"]:
                self.report.note(words)

    def finder(self, kernel: str, how: str) -> dict:
        """The first row with this finding."""
        rows = (it for it in self.report.failed() if it.get("kernel") == kernel)
        return next((it for it in rows if it.get("how", "wrong") == how), {})

    def again(
        self,
        kernel: str,
        finder: dict,
        end: float,
        *words: str,
        prefix: tuple[str, ...] = (),
        limit: float = 20,
        environment: dict[str, str] | None = None,
    ) -> tuple[Ended, list[dict]]:
        """Runs what `finder` found once more, and reports what that tells."""
        told: list[dict] = []
        # Imports of Python's frameworks take their time.
        limit += 30 if "part" in finder else 0
        name = re.sub(r"[^a-z0-9]+", "-", f"diagnosis-{kernel}-{len(list(self.work.glob('diagnosis/*.log')))}")
        file = self.work / "diagnosis" / name
        if "part" in finder:
            program = [*self.parts.program, "--part", finder["part"], "--unit", str(finder["unit"])]
            # Peers are left out: only our kernel is of interest.
            program += [*self.parts.words, "--broken", str(finder["unit"])]
        else:
            program = [str(pack.program(PROBE)), "--seed", str(self.report.content.get("seed", 1))]
            if finder.get("probe") == FORMS:
                # With the sizes and numbers of blocks of the times, in the place of this build's kernels.
                program += ["--part", FORMS, "--kernels", kernel.replace("forward", "backward")]
            elif "--part" not in words:
                program += ["--part", f"probe {kernel}"]
            program += ["--dry"] if self.report.content.get("dry") else []
        work = Work(
            name,
            [*prefix, *program, "--lines", f"{file}.jsonl", *words],
            limit * self.parts.slower,
            lines=file.with_suffix(".jsonl"),
            log=file.with_suffix(".log"),
        )
        work.environment = {**self.environment(), **(environment or {})}
        return one(work, end, lambda _, line: told.append(line)), told

    def hang(self, kernel: str, end: float) -> list[str]:
        watch = HERE / "forms" / "watch"
        if not watch.is_dir():
            return ["hangs; the pack has no kernels that tell where their warps wait (forms/watch)"]
        finder = self.finder(kernel, "hang")
        ended, told = self.again(kernel, finder, end, "--form", str(watch), "--patience", "8")
        waits = next((it["waits"] for it in told if "waits" in it), None)
        if waits:
            return [f"hangs: block {waits['block']}, thread {waits['thread']} waits too long", *places(waits["warps"])]
        raised = next((it["raised"] for it in told if "raised" in it), "")
        how = raised or ended.why or "it ends there"
        return [f"hangs, but not so in the form that tells where warps wait ({how}): it depends on times"]

    def fault(self, kernel: str, end: float) -> list[str]:
        finder, nothing = self.finder(kernel, "fault"), ""
        if sanitizer := machine.tool("compute-sanitizer"):
            prefix = (sanitizer, "--tool", "memcheck", "--error-exitcode", str(SANITIZER_FOUND), "--print-limit", "3")
            ended, _ = self.again(kernel, finder, end, "--patience", "30", prefix=prefix, limit=40)
            if lines := first_report(ended.output):
                return ["faults: by compute-sanitizer", *lines]
            nothing = f"; compute-sanitizer names no access ({last_words(ended)})"
        dump = self.work / "diagnosis" / f"{kernel}.core"
        dump.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
            "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP": "1",
            "CUDA_COREDUMP_FILE": str(dump),
        }
        self.again(kernel, finder, end, environment=environment)
        debugger = machine.tool("cuda-gdb")
        if debugger and dump.exists():
            commands = (
                f"target cudacore {dump}",
                "info cuda kernels",
                "info cuda lanes",
                "x/6i $pc",
                "info registers $errorpc",
            )
            command = [debugger, "-batch", "-nx", *(word for it in commands for word in ("-ex", it))]
            read = one(Work("cuda-gdb", command, 30 * self.parts.slower, log=dump.with_suffix(".log")), end)
            return [f"faults: by its core dump{nothing}", *exception_lines(read.output)]
        missing = [it for it in ("compute-sanitizer", "cuda-gdb") if not machine.tool(it)]
        what = f"{' and '.join(missing)} are not on this machine" if missing else "no core dump was written"
        kept = []
        if dump.exists() and keep.fits(dump):
            kept = [f"cuda-gdb elsewhere reads its core dump, diagnosis/{dump.name}.gz of logs.tar.gz"]
        elif dump.exists():
            kept = [f"its core dump has {dump.stat().st_size >> 20} MiB: too large to come back"]
        return [f"faults; its address is not known: {what}{nothing}", *kept]

    def wrong(self, kernel: str, end: float) -> list[str]:
        tables: dict[str, dict] = {}
        for row in self.report.failed():
            if row.get("kernel") == kernel and row.get("wrong"):
                tables.setdefault(row["what"], row)
        if not tables:
            return ["wrong, without an element that is"]
        first = next(iter(tables.values()))["wrong"]
        names = ", ".join(sorted(tables))
        lines = [f"wrong in {names}; first {first['first']}: {first['ours']}, right is {first['right']}"]
        emulated = HERE / "emulated"
        if not emulated.is_dir():
            return [*lines, "the pack has no emulated driver to ask"]
        for row in list(tables.values())[:TABLES]:
            place = "there" if row["wrong"] is first else f"at {row['wrong']['first']}"
            lines.append(self.emulated(kernel, row, place, emulated, end))
        return lines

    def emulated(self, kernel: str, row: dict, place: str, emulated: Path, end: float) -> str:
        """The emulated GPU's number at the first wrong element of a row, and what that means."""
        it = row["wrong"]
        if it.get("given"):
            words = ["--part", "given", "--case", it["given"]]
        elif "part" in row and it["first"].count(":") == 3:
            return "the emulated GPU is not asked: there was no room for the inputs"
        else:
            words = ["--at", it["first"]]
        # Not what the process was told to play.
        environment = {"LD_LIBRARY_PATH": str(emulated), "CADRE_EMULATED_WRONG": ""}
        ended, told = self.again(kernel, {}, end, *words, "--patience", "60", environment=environment, limit=60)
        # The machine's own driver may be found first, by another name.
        device = next((it["facts"]["device"] for it in told if "device" in it.get("facts", {})), None)
        if device != EMULATED:
            why = f"{device} answered" if device else ended.why or "nothing answered"
            return f"the emulated driver could not be asked: {why}"
        values = [line["value"] for line in told if line.get("value") and line.get("check") in (None, row["check"])]
        if values:
            same = close(float(values[0]), float(it["right"]))
            return f"the emulated GPU has {values[0]} {place}: {meaning(same)}"
        # What has no such place, as bytes have none.
        rows = [line["row"] for line in told if line.get("row", {}).get("what") == row["what"]]
        if not rows:
            return f"the emulated GPU does not say what it has {place} ({ended.why or 'no such element'})"
        if rows[0]["passed"]:
            return f"the emulated GPU is right {place}: {meaning(True)}"
        it = rows[0]["wrong"]
        return f"the emulated GPU has {it['ours']} at {it['first']}: {meaning(False)}"


def meaning(is_right: bool) -> str:
    if is_right:
        return "the kernel's source is right as we read the hardware: the GPU does something else"
    return "it is wrong there, too: the kernel's source is, not how the GPU reads it"


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 0.05 * max(abs(b), 0.05)


def places(warps: list[dict]) -> list[str]:
    """Warps by what they wait for, most first; a warp of each."""
    counts = Counter(it["waits_for"] for it in warps)
    lines = []
    for what, count in counts.most_common(PLACES):
        those = [f"block {it['block']} warp {it['warp']}" for it in warps if it["waits_for"] == what]
        lines.append(f"{count} warps wait for {what}: {', '.join(those[:6])}{', …' if len(those) > 6 else ''}")
    if len(counts) > PLACES:
        lines.append(f"… and for {len(counts) - PLACES} other things")
    return lines


def first_report(output: str) -> list[str]:
    """The first finding of compute-sanitizer: what, where in the kernel, by which thread, which address.

    None where it names no place in a kernel: it refuses some machines, and says of a program only that it failed.
    """
    lines = [it.removeprefix("=========").strip() for it in output.splitlines() if it.startswith("=========")]
    for index, line in enumerate(lines[:-1]):
        if lines[index + 1].startswith("at ") and "Saved host" not in line:
            return [it for it in lines[index : index + 5] if it and "Saved host" not in it]
    return []


def last_words(ended: Ended) -> str:
    """The last line that a program printed; if there is none, how it ended."""
    lines = [it.strip() for it in ended.output.splitlines() if it.strip("= ")]
    return lines[-1][:150] if lines else ended.why or "exit 0"


def exception_lines(output: str) -> list[str]:
    wanted = re.compile(r"exception|PC|0x[0-9a-f]{6}|=>|Kernel|block|thread", re.IGNORECASE)
    lines = [it.strip() for it in output.splitlines() if wanted.search(it) and "Opening" not in it]
    return lines[:10] or ["cuda-gdb says nothing of it; its log is in the archive"]
