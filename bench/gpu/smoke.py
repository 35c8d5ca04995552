"""The first half minute: every kernel once, without Python's frameworks; and times of the forms that the build carries.

In: cadre-gpu-probe, forms of the kernels. Out: rows; `kernels` of the report, what each kernel does (right, wrong,
hang, fault), by the rows of all stages so far. A kernel that hangs or faults is not asked again by later stages: its
cause is told once (diagnosis.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pack
from parts import DIMS, FORMS, Part, Parts
from report import Report

HERE = Path(__file__).resolve().parent
PROBE = "cadre-gpu-probe"
SMOKE, DECISIONS = "smoke", "decisions between forms"
# Who ends dQ of every backward pass.
FINISH = "cadre_finish_dq"
# Seconds after which a launch is taken to hang; each of the smoke test takes milliseconds.
PATIENCE = 4


def part(name: str, limit: float, kernels: str) -> Part:
    """The probe as a part of the check; its own patience with a launch is shorter than its silence."""
    words = ["--forms", str(HERE / "forms"), "--patience", str(PATIENCE), *(["--kernels", kernels] if kernels else [])]
    # As often as there are units: one that hangs costs itself alone. A driver that nobody has used yet may take 20 s to
    # open; a launch that does not end is told by the probe.
    return Part(name, limit, 30, again=24, program=[str(pack.program(PROBE))], words=words)


class Smoke:
    def __init__(self, report: Report, parts: Parts, environment: Callable[[], dict[str, str]]) -> None:
        self.report, self.parts, self.environment = report, parts, environment
        self.kernels = ""  # names by commas, where not all are asked for

    def run(self, end: float) -> None:
        self.parts.run([part(SMOKE, 60, self.kernels)], 1, end, self.environment())
        self.judge()

    def forms(self, end: float) -> None:
        """Of the head dims whose kernels neither hang nor fault."""
        broken, asked = names(self.report.content, ("hang", "fault")), set(filter(None, self.kernels.split(",")))
        backward = {dim: f"cadre_backward_{dim}" for dim in DIMS}
        wanted = [dim for dim in DIMS if not asked or backward[dim] in asked]
        ends = {dim: sorted(broken & {f"cadre_forward_{dim}", backward[dim], FINISH}) for dim in wanted}
        for dim in filter(ends.get, wanted):
            self.report.not_run(f"{DECISIONS}, d{dim}", f"{', '.join(ends[dim])}: hangs or faults")
        kernels = ",".join(backward[dim] for dim in wanted if not ends[dim])
        if not kernels:
            return
        self.parts.run([part(FORMS, 200, kernels)], 1, end, self.environment())

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


def names(content: dict, how: tuple[str, ...]) -> set[str]:
    return {kernel for kernel, it in content["kernels"].items() if it in how}
