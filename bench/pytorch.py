#!/usr/bin/env python3
"""What the Python package costs: beside torch's own attention, beside the same job without a pool, and by itself.

    bench/pytorch.py [--rounds N] [--steps N] [--no-jobs]

In: a build, and the environment of PyTorch, into which it starts itself anew (`scripts/pytorch`). Out:
target/bench/pytorch.json and a line a case. Ours and the peer's runs alternate; a case is the median of its rounds.

- A call of attention of one row against an autograd Function that does nothing.
- Attention in this process (`local()`) against torch's on packed batches, two threads: each side's best process.
- The same call right behind operators of torch, whose threads spin for a while before they sleep (OpenMP), against one
  for which they sleep at once (`OMP_WAIT_POLICY=passive`), two threads each.
- `examples/pytorch_llama.py` on two ranks and two servers, a thread each: with whole documents against its two ranks
  without a job, with documents over the ranks' edge against the same job with `--attention local`. Wall and CPU seconds
  of all processes for the steps after the first, peak memory of a process, and the wait before a step; that wait in
  steps of calls alone, too, which were announced (`next`) or not.
- Seconds of `import cadre` behind torch, and the size of a wheel of the last build.
"""

import argparse
import importlib.metadata
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "target" / "bench"
EXAMPLES = ROOT / "examples"
TOKENS = 2048
PERCENT = "% of a step"
LENGTHS = ([2048], [700, 33, 410, 905], [64] * 32)
HEADS, KV_HEADS, DIM = 8, 2, 64
CALLS = 7


class Cases:
    """Lines of the result."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def __call__(self, case: str, ours: float, peer: float, peer_name: str, unit: str) -> None:
        ratio = peer / ours if ours else None
        line = {"case": case, "ours": ours, "peer": peer, "peer_name": peer_name, "unit": unit, "ratio": ratio}
        self.lines.append(line)
        print(f"{case}: {ours:.4g} {unit}, {peer_name} {peer:.4g}, ratio {ratio or 0:.3f}", flush=True)


def median_of(call: Callable[[], object], times: int) -> float:
    """Seconds of a call."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def overhead(cases: Cases, rounds: int) -> None:
    import cadre
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return q.clone()

        @staticmethod
        def backward(ctx, dout):
            return dout, *ctx.saved_tensors[1:]

    torch.set_num_threads(1)
    rows = [torch.randn(1, 1, 8).requires_grad_() for _ in range(3)]
    ends = torch.tensor([0, 1], dtype=torch.int32)

    def ours():
        return cadre.flash_attn_varlen_func(*rows, ends, ends, 1, 1, causal=True)

    def nothing():
        return Nothing.apply(*rows)

    gradient = torch.ones(1, 1, 8)

    def with_backward(call):
        return lambda: torch.autograd.grad(call(), rows, gradient)

    def with_expanded(call):
        # The gradient of a sum is one number that is spread over all rows, and has to be copied.
        return lambda: torch.autograd.grad(call().sum(), rows)

    for name, bar, made in (
        ("forward", 30, lambda it: it),
        ("forward and backward", 60, with_backward),
        ("forward and backward of a sum", 60, with_expanded),
    ):
        one, other = made(ours), made(nothing)
        samples = [(median_of(one, 300), median_of(other, 300)) for _ in range(rounds + 1)][1:]
        more = statistics.median(a - b for a, b in samples)
        cases(f"a call, {name}, above a Function that does nothing", more * 1e6, bar, "the bar", "us")


def beside_torch(lengths: list[int]) -> dict[str, float]:
    """Milliseconds of both, each the median of its calls in this process."""
    import cadre
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(2)
    count = sum(lengths)
    rows = [torch.randn(count, it, DIM).requires_grad_() for it in (HEADS, KV_HEADS, KV_HEADS)]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    gradient = torch.randn(count, HEADS, DIM)

    def ours():
        return cadre.flash_attn_varlen_func(*rows, ends, ends, 0, 0, causal=True)

    def theirs():
        documents = zip(*(it.split(lengths) for it in rows), strict=True)
        each = (
            scaled_dot_product_attention(*(it.transpose(0, 1)[None] for it in one), is_causal=True, enable_gqa=True)
            for one in documents
        )
        return torch.cat([it[0].transpose(0, 1) for it in each])

    samples = defaultdict(list)
    for _ in range(CALLS + 1):
        for name, call in (("ours", ours), ("theirs", theirs)):
            began = time.perf_counter()
            out = call()
            middle = time.perf_counter()
            torch.autograd.grad(out, rows, gradient)
            samples[f"{name} forward"].append(middle - began)
            samples[f"{name} backward"].append(time.perf_counter() - middle)
    return {name: 1e3 * statistics.median(it[1:]) for name, it in samples.items()}


def beside_torchs_attention(cases: Cases, rounds: int) -> None:
    """Each side's best process of several: in some, torch's two threads wait for the system's scheduler at each
    operator, all the time."""
    version = importlib.metadata.version("torch")
    for lengths in LENGTHS:
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            command = [sys.executable, __file__, "--beside-torch", json.dumps(lengths)]
            done = subprocess.run(command, capture_output=True, check=True)
            for name, it in json.loads(done.stdout).items():
                found[name].append(it)
        told = f"{len(lengths)} documents of {sum(lengths)} rows, heads {HEADS}:{KV_HEADS}, dim {DIM}"
        for way in ("forward", "backward"):
            one, other = (min(found[f"{name} {way}"]) for name in ("ours", "theirs"))
            cases(f"local(), {told}, {way}", one, other, f"PyTorch {version} SDPA", "ms")


def ended(processes: list[subprocess.Popen]) -> tuple[float, float]:
    """CPU seconds of the processes with all they started, and MiB of the largest of all."""
    cpu, peak = 0.0, 0.0
    for it in processes:
        _, status, usage = os.wait4(it.pid, 0)
        it.returncode = os.waitstatus_to_exitcode(status)
        if it.returncode:
            raise SystemExit(f"{it.args} ended with exit code {it.returncode}")
        cpu, peak = cpu + usage.ru_utime + usage.ru_stime, max(peak, usage.ru_maxrss / 1024)
    return cpu, peak


def run(kind: str, steps: int, folder: Path) -> tuple[float, float, float]:
    """Wall and CPU seconds, MiB of a rank. Kinds: `pool` and `alone` of whole documents, `over` and `over local` of
    such as go on in the next rank."""
    options = [f"--steps={steps}", f"--tokens={TOKENS}", *(["--whole"] if kind in ("pool", "alone") else [])]
    began = time.perf_counter()
    with (folder / "said").open("wb") as said:
        more = {"stdout": said, "stderr": said, "cwd": ROOT}
        if kind != "alone":
            text = (EXAMPLES / "pytorch.yaml").read_text().replace("[--steps=30, --tokens=2048]", json.dumps(options))
            (folder / "job.yaml").write_text(text)
            how = ["--attention=local"] if kind == "over local" else []
            processes = [cadre_run(folder, f"run-{steps}", how, more)]
        else:
            with socket.create_server(("127.0.0.1", 0)) as it:
                port = str(it.getsockname()[1])
            meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, EXAMPLES / "pytorch_llama.py", *options]
            processes = [
                subprocess.Popen(command, **more, env=os.environ | meet | {"RANK": str(it)}) for it in range(2)
            ]
        cpu, peak = ended(processes)
    return time.perf_counter() - began, cpu, peak


def cadre_run(folder: Path, out: str, how: list[str], more: dict[str, object]) -> subprocess.Popen:
    program = Path(os.environ["CADRE_PROGRAMS"]) / "cadre"
    return subprocess.Popen([program, "run", "-f", folder / "job.yaml", "--out", folder / out, *how], **more)


def waits_of(run_folder: Path) -> list[float]:
    """Shares of steps for which ranks waited before the first call; not of the first one."""
    told = [json.loads(it) for it in (run_folder / "steps.jsonl").read_text().splitlines()]
    return [it["header_wait_seconds"] / it["seconds"] for it in told[1:]]


def jobs(cases: Cases, rounds: int, steps: int) -> None:
    for ours, peer, documents, peer_name in (
        ("pool", "alone", "whole documents", "local()"),
        ("over", "over local", "documents over the edge", "--attention local"),
    ):
        samples: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        waits = []
        for number in range(rounds):
            for kind in (ours, peer)[:: 1 if number % 2 else -1]:
                with tempfile.TemporaryDirectory(prefix="cadre-bench-") as name:
                    folder = Path(name)
                    short, long = run(kind, 1, folder), run(kind, 1 + steps, folder)
                    samples[kind].append((long[0] - short[0], long[1] - short[1], long[2]))
                    if kind == ours:
                        waits += waits_of(folder / f"run-{1 + steps}")
        told = f"{steps} steps of a Llama on 2 ranks and 2 servers, {documents}"
        for at, (what, unit) in enumerate((("wall", "s"), ("CPU", "s"), ("peak memory of a process", "MiB"))):
            one, other = (statistics.median(it[at] for it in samples[kind]) for kind in (ours, peer))
            cases(f"{told}, {what}", one, other, peer_name, unit)
        cases(f"wait before a step's first call, {documents}", 100 * statistics.median(waits), 1.0, "the bar", PERCENT)


STEPS_OF_CALLS = """
import sys, cadre, torch
torch.set_num_threads(1)
cadre.init(cadre.Shape(8, 2, 64, ("causal",) * 4), steps=12)
layout, following = [300, 700, 24], [300, 700, 24] if "next" in sys.argv else None
q, k, v = (torch.randn(1024, it, 64).requires_grad_() for it in (8, 2, 2))
ends = torch.tensor([0, 300, 1000, 1024], dtype=torch.int32)
while cadre.begin_step(layout, next=following):
    results = [cadre.flash_attn_varlen_func(q, k, v, ends, ends, 0, 0, causal=True) for _ in range(4)]
    for it in reversed(results):
        it.sum().backward()
"""


def steps_of_calls(cases: Cases, rounds: int) -> None:
    waits: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for how in ("next", "none"):
            with tempfile.TemporaryDirectory(prefix="cadre-bench-") as name:
                folder = Path(name)
                (folder / "steps.py").write_text(STEPS_OF_CALLS)
                text = (EXAMPLES / "pytorch.yaml").read_text().replace("torchrun, examples/pytorch_llama.py", "python")
                words = json.dumps([str(folder / "steps.py"), how])
                (folder / "job.yaml").write_text(text.replace("[--steps=30, --tokens=2048]", words))
                with (folder / "said").open("wb") as said:
                    ended([cadre_run(folder, "run", [], {"stdout": said, "stderr": said, "cwd": ROOT})])
                waits[how] += waits_of(folder / "run")
    for how, told in (("next", "announced a step ahead"), ("none", "announced when they begin")):
        share = 100 * statistics.median(waits[how])
        cases(f"wait before the first call of steps of calls alone, {told}", share, 1.0, "the bar of batches", PERCENT)


BEHIND_TORCH = """
import statistics, time, cadre, torch
torch.set_num_threads(2)
q, k, v = (torch.randn(1024, it, 64) for it in (8, 2, 2))
ends, square, taken = torch.tensor([0, 1024], dtype=torch.int32), torch.randn(512, 512), []
for _ in range(60):
    # Both threads of torch's have just been at work.
    torch.nn.functional.gelu(square @ square)
    began = time.perf_counter()
    cadre.flash_attn_varlen_func(q, k, v, ends, ends, 0, 0, causal=True)
    taken.append(time.perf_counter() - began)
print(statistics.median(taken[10:]))
"""


def behind_torch(cases: Cases, rounds: int) -> None:
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for policy in ("", "passive"):
            environment = {it: value for it, value in os.environ.items() if it != "OMP_WAIT_POLICY"}
            environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
            command = [sys.executable, "-c", BEHIND_TORCH]
            done = subprocess.run(command, capture_output=True, check=True, env=environment)
            taken[policy].append(1e3 * float(done.stdout))
    one, other = (statistics.median(taken[it]) for it in ("", "passive"))
    cases("local(), 1,024 rows right behind an operator of torch", one, other, "threads that do not spin", "ms")


def package(cases: Cases, rounds: int) -> None:
    code = "import torch, time; began = time.perf_counter(); import cadre; print(time.perf_counter() - began)"
    with tempfile.TemporaryDirectory() as name:
        # As one that is installed: its bytecode is there from the second time on.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": name}
        more = {"capture_output": True, "check": True, "env": environment}
        taken = [subprocess.run([sys.executable, "-c", code], **more) for _ in range(rounds + 1)]
        median = statistics.median(float(it.stdout) for it in taken[1:])
        cases("import cadre, after torch", median * 1e3, 100, "the bar", "ms")
    with tempfile.TemporaryDirectory() as name:
        library, wheel = Path(name) / "library", Path(name) / "wheel"
        native = Path(os.environ["CADRE_PROGRAMS"]) / "libcadre_python.so"
        subprocess.run(["strip", "-o", library, native], check=True)
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
            file.write(library, "cadre/_native.abi3.so")
            for it in sorted((ROOT / "python" / "cadre").rglob("*")):
                if it.is_file() and "__pycache__" not in it.parts:
                    file.write(it, it.relative_to(ROOT / "python"))
        cases("a wheel, stripped", wheel.stat().st_size / 2**20, 8, "the bar", "MiB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a job")
    parser.add_argument("--no-jobs", action="store_true")
    parser.add_argument("--beside-torch", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.beside_torch:
        print(json.dumps(beside_torch(options.beside_torch)))
        return
    cases = Cases()
    overhead(cases, options.rounds)
    beside_torchs_attention(cases, options.rounds)
    behind_torch(cases, options.rounds)
    package(cases, options.rounds)
    if not options.no_jobs:
        steps_of_calls(cases, options.rounds)
        jobs(cases, options.rounds, options.steps)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "pytorch.json").write_text(json.dumps(cases.lines) + "\n")


if __name__ == "__main__":
    if "CADRE_PROGRAMS" not in os.environ:
        os.execv(ROOT / "scripts" / "pytorch", ["pytorch", "python", __file__, *sys.argv[1:]])
    main()
