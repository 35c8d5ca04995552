"""The first half minute: every kernel once, without Python's frameworks; and what is found out about a kernel that is
wrong.

In: cadre-gpu-probe, forms of the kernels, the emulated driver, the machine's tools. Out: rows; `kernels` of the
report, what each kernel does (right, wrong, hang, fault); `diagnosis`, lines a kernel. A kernel that hangs or faults
is not asked again by later stages: its cause is told once.

hang    the probe again with kernels that tell where their warps wait, and trap
fault   the probe again under compute-sanitizer, which names address and instruction; else a core dump, read by cuda-gdb
wrong   the probe over the emulated driver with the same inputs: what the element is there
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import machine
from parts import Part, Parts
from report import Report
from sessions import Ended, Work, one

HERE = Path(__file__).resolve().parent
PROBE = HERE / "cadre-gpu-probe"
SMOKE, FORMS = "smoke", "forms"
# Kernels that are diagnosed, at most: of one cause the first ones tell it.
DIAGNOSED = 4
# Lines of the places of warps.
PLACES = 12
SANITIZER_FOUND = 9
# Seconds after which a launch is taken to hang; each of the smoke test takes milliseconds.
PATIENCE = 4


def part(name: str, limit: float, kernels: str) -> Part:
    """The probe as a part of the check; its own patience with a launch is shorter than its silence."""
    words = ["--forms", str(HERE / "forms"), "--patience", str(PATIENCE), *(["--kernels", kernels] if kernels else [])]
    # As often as there are units: one that hangs costs itself alone.
    return Part(name, limit, 15, again=24, program=[str(PROBE)], words=words)


class Smoke:
    def __init__(self, report: Report, parts: Parts, work: Path, environment: Callable[[], dict[str, str]]) -> None:
        self.report, self.parts, self.work, self.environment = report, parts, work, environment
        self.kernels = ""  # names by commas, where not all are asked for

    def run(self, end: float) -> None:
        self.parts.run([part(SMOKE, 60, self.kernels)], 1, end, self.environment())
        self.judge()

    def forms(self, end: float) -> None:
        broken = [it for it, how in self.report.content["kernels"].items() if how in ("hang", "fault")]
        if any("backward" in it or "forward" in it for it in broken):
            return self.report.not_run("decisions between forms", f"{', '.join(sorted(broken))} hang or fault")
        self.parts.run([part(FORMS, 200, self.kernels)], 1, end, self.environment())

    def judge(self) -> None:
        """What each kernel does, by the rows so far."""
        kernels = self.report.content["kernels"]
        for row in self.report.content["checks"]:
            kernel = row.get("kernel")
            if not kernel or kernels.get(kernel) in ("hang", "fault"):
                continue
            how = row.get("how", "right" if row["passed"] else "wrong")
            if kernels.get(kernel) != "wrong" or how != "right":
                kernels[kernel] = how

    def diagnose(self, end: float) -> None:
        kernels = self.report.content["kernels"]
        found = self.report.content.setdefault("diagnosis", {})
        broken = [it for it in kernels.items() if it[1] != "right" and it[0] not in found]
        broken.sort(key=lambda it: ORDER.index(it[1]))
        for kernel, how in broken[:DIAGNOSED]:
            self.report.say(f"{kernel}: {how}, diagnosed")
            asked = {"hang": self.hang, "fault": self.fault, "wrong": self.wrong}[how]
            found[kernel] = asked(kernel, end)
            for line in found[kernel]:
                self.report.say(f"  {line}")
            self.report.store()
        if len(broken) > DIAGNOSED:
            names = ", ".join(f"{kernel} ({how})" for kernel, how in broken[DIAGNOSED:])
            self.report.note(f"not diagnosed, as {DIAGNOSED} kernels were: {names}")

    def probe(
        self,
        kernel: str,
        end: float,
        *words: str,
        prefix: tuple[str, ...] = (),
        limit: float = 20,
        environment: dict[str, str] | None = None,
    ) -> tuple[Ended, list[dict]]:
        """One kernel once more; what it tells."""
        told: list[dict] = []
        name = re.sub(r"[^a-z0-9]+", "-", f"diagnosis-{kernel}-{len(list(self.work.glob('diagnosis/*.log')))}")
        file = self.work / "diagnosis" / name
        seed = str(self.report.content.get("seed", 1))
        command = [*prefix, str(PROBE), "--part", f"probe {kernel}", "--lines", f"{file}.jsonl", "--seed", seed, *words]
        command += ["--dry"] if self.report.content.get("dry") else []
        work = Work(
            name, command, limit * self.parts.slower, lines=file.with_suffix(".jsonl"), log=file.with_suffix(".log")
        )
        work.environment = {**self.environment(), **(environment or {})}
        return one(work, end, lambda _, line: told.append(line)), told

    def hang(self, kernel: str, end: float) -> list[str]:
        watch = HERE / "forms" / "watch"
        if not watch.is_dir():
            return ["hangs; the pack has no kernels that tell where their warps wait (forms/watch)"]
        ended, told = self.probe(kernel, end, "--form", str(watch), "--patience", "8")
        waits = next((it["waits"] for it in told if "waits" in it), None)
        if waits:
            return [f"hangs: block {waits['block']}, thread {waits['thread']} waits too long", *places(waits["warps"])]
        raised = next((it["raised"] for it in told if "raised" in it), "")
        how = raised or ended.why or "it ends there"
        return [f"hangs, but not so in the form that tells where warps wait ({how}): it depends on times"]

    def fault(self, kernel: str, end: float) -> list[str]:
        if sanitizer := machine.tool("compute-sanitizer"):
            prefix = (sanitizer, "--tool", "memcheck", "--error-exitcode", str(SANITIZER_FOUND), "--print-limit", "3")
            ended, _ = self.probe(kernel, end, "--patience", "30", prefix=prefix, limit=40)
            if lines := first_report(ended.output):
                return ["faults: by compute-sanitizer", *lines]
        dump = self.work / "diagnosis" / f"{kernel}.core"
        dump.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
            "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP": "1",
            "CUDA_COREDUMP_FILE": str(dump),
        }
        self.probe(kernel, end, environment=environment)
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
            return ["faults: by its core dump", *exception_lines(read.output)]
        missing = [it for it in ("compute-sanitizer", "cuda-gdb") if not machine.tool(it)]
        what = f"{' and '.join(missing)} are not on this machine" if missing else "no core dump was written"
        return [f"faults; its address is not known: {what}"]

    def wrong(self, kernel: str, end: float) -> list[str]:
        rows = [it for it in self.report.content["checks"] if it.get("kernel") == kernel and it.get("wrong")]
        if not rows:
            return ["wrong, without an element that is"]
        first = rows[0]["wrong"]
        tables = ", ".join(sorted({it["what"] for it in rows}))
        line = f"wrong in {tables}; first {first['first']}: {first['ours']}, right is {first['right']}"
        emulated = HERE / "emulated"
        if not emulated.is_dir():
            return [line, "the pack has no emulated driver to ask"]
        # Not what the process was told to play.
        environment = {"LD_LIBRARY_PATH": str(emulated), "CADRE_EMULATED_WRONG": ""}
        at = ["--at", first["first"], "--patience", "60"]
        ended, told = self.probe(kernel, end, *at, environment=environment, limit=60)
        values = [it["value"] for it in told if it.get("value") and it.get("check") == rows[0]["check"]]
        if not values:
            return [line, f"the emulated GPU does not say what it is there ({ended.why or 'no such element'})"]
        same = close(float(values[0]), float(first["right"]))
        means = (
            "the kernel's source is right as we read the hardware: the GPU does something else"
            if same
            else "it is wrong there, too: the kernel's source is, not how the GPU reads it"
        )
        return [line, f"the emulated GPU has {values[0]} there: {means}"]


ORDER = ["hang", "fault", "wrong", "right"]


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
    """The first finding of compute-sanitizer: what, where in the kernel, by which thread, which address."""
    lines = [it.removeprefix("=========").strip() for it in output.splitlines() if it.startswith("=========")]
    for index, line in enumerate(lines):
        if (
            re.match(r"(Invalid|Out-of-range|Misaligned|Program hit|Potential|Error|Access)", line)
            and "API call" not in line
        ):
            return [it for it in lines[index : index + 5] if it and "Saved host" not in it]
    return []


def exception_lines(output: str) -> list[str]:
    wanted = re.compile(r"exception|PC|0x[0-9a-f]{6}|=>|Kernel|block|thread", re.IGNORECASE)
    lines = [it.strip() for it in output.splitlines() if wanted.search(it) and "Opening" not in it]
    return lines[:10] or ["cuda-gdb says nothing of it; its log is in the archive"]


def names(content: dict, how: tuple[str, ...]) -> set[str]:
    return {kernel for kernel, it in content["kernels"].items() if it in how}
