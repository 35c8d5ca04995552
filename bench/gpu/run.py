"""Everything that wants a GPU, in one call: checks, sanitizer, bench beside peers, training runs.

Usage: run.py [--out DIR] [--seconds N] [--dry]

In: the folder of this file, as `make gpu-check` packs it: libcadre_gpu.so, device-tests, cadre, plans, data, wheels.
Needs Python with PyTorch and a Hopper GPU; builds nothing. Out: a table last, DIR/gpu-check.json beside it, exit code
1 if a check failed. After N seconds (540) what has not begun is left out, aloud. --dry runs the checks of the host's
side on the CPU, with a driver library whose GPU is emulated; it measures nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
BEGAN = time.monotonic()
LONG = "one document of 32896 rows"


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


def unpack_wheels(folder: Path) -> None:
    """Wheels of peers that this Python lacks, beside the rest of its packages."""
    for wheel in sorted((HERE / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    sys.path.append(str(folder))


def show_libraries_to_programs() -> None:
    """Programs that are started from here find the driver library and the cuBLASLt that PyTorch has found."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(("libcuda.so", "libcublasLt.so")) and str(path.parent) not in folders:
            folders.append(str(path.parent))
    os.environ["LD_LIBRARY_PATH"] = ":".join(it for it in folders if it)


def native_tests(dry: bool) -> Iterator[dict]:
    """The Rust face's own tests on this GPU, then under compute-sanitizer."""
    program = HERE / "device-tests"
    words = ["--ignored", "--test-threads=1", "emulated::forward", "emulated::backward", "emulated::plans"]
    words += [
        "emulated::linear::products",
        "emulated::arenas::memory",
        "emulated::arenas::gates",
        "emulated::arenas::rooms",
        "emulated::sinks::sinks",
        "emulated::softcap::softcap",
        "emulated::graphs::runs",
        "emulated::rows::copies",
        "emulated::rows::pieces",
    ]
    exchange = [str(HERE / "exchange-tests"), "rows_go_from_one_process_to_another_by_copies_of_the_gpu"]
    runs: list[tuple[str, list[str]]] = [("Rust face against f64", []), ("rows between two processes", exchange)]
    sanitizer = shutil.which("compute-sanitizer") or next(
        (str(it) for it in Path("/").glob("usr/local/cuda*/bin/compute-sanitizer")), None
    )
    if dry:
        say("  compute-sanitizer: not run, there is no GPU")
    elif sanitizer is None:
        say("  compute-sanitizer is not on this machine: NOT RUN")
        yield {"check": "compute-sanitizer", "what": "is not on this machine: not run", "error": 0, "passed": True}
    else:
        for tool in ("memcheck", "racecheck"):
            runs.append((f"compute-sanitizer {tool}", [sanitizer, "--tool", tool, "--error-exitcode", "9"]))
    for name, prefix in runs:
        begin = time.monotonic()
        # Under a sanitizer the small shapes of all kernels, with and without softcap.
        chosen = words if not prefix else [*words[:5], "emulated::softcap::softcap", "emulated::rows::copies"]
        command = prefix if prefix is exchange else [*prefix, str(program), *chosen]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "CADRE_TEST_DRIVER": "machine"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=90,
                check=False,
            )
            ran = "test result: ok" in done.stdout and " 0 passed" not in done.stdout
            passed, words_of_end = done.returncode == 0 and ran, f"exit {done.returncode}"
            if not passed:
                say(done.stdout[-3000:])
        except subprocess.TimeoutExpired:
            passed, words_of_end = False, "no end after 90 s"
        what = f"{words_of_end}, {time.monotonic() - begin:.0f} s"
        yield {"check": name, "what": what, "error": 0 if passed else 1, "passed": passed}


def batches(heads_of: Callable) -> Iterator[tuple[str, Callable]]:
    """Names of groups and their batches, what matters most first."""
    from cases import dense, packed, planned, short_tasks
    from ours import CAUSAL, FULL

    lengths = {it.stem: json.loads(it.read_text())["ranks"] for it in sorted((HERE / "workloads").glob("*.json"))}
    for rows in (16, 32):
        yield "dense", lambda rows=rows: dense(heads_of(128), rows * 1024, 32 // rows, CAUSAL)
    for name, ranks in lengths.items():
        flat = [it for rank in ranks for it in rank]
        plan = HERE / "plans" / f"{name}.json"
        yield "tasks", lambda n=name, p=plan, f=flat: planned(heads_of(128), n, p, f, 0)
        yield "packed", lambda n=name, r=ranks: packed(heads_of(128), n, r[0])
    yield "short", lambda: short_tasks(heads_of(128), 65536, 4)
    yield "short", lambda: dense(heads_of(128), 32896, 1, CAUSAL)  # as many pairs in one document
    for dim in (128, 64, 256):
        for mask in (CAUSAL, FULL):
            for rows in (8, 2, 4, 16, 32, 64):
                if dim == 128 and mask == CAUSAL and rows in (16, 32):
                    continue
                yield (
                    "dense",
                    lambda d=dim, m=mask, r=rows: dense(heads_of(d), r * 1024, max(1, 16 // r), m),
                )
        for name, ranks in lengths.items():
            if dim != 128:
                flat = [it for rank in ranks for it in rank]
                plan = HERE / "plans" / f"{name}.json"
                yield "tasks", lambda n=name, p=plan, f=flat, d=dim: planned(heads_of(d), n, p, f, 1)


def dry_batches() -> Iterator[dict]:
    """The bench's batches without a GPU: peers are given the pairs that Cadre's masks keep."""
    from ours import Heads, kept_pairs

    for _, make in batches(lambda dim: Heads(16, 2, dim)):
        batch = make()
        pairs = 0
        for rows, keys, _, _ in batch.sequences:
            pairs += rows * keys - (rows * (rows - 1) // 2 if batch.causal else 0)
        same = pairs == kept_pairs(batch.lines)
        yield {"check": f"{batch.heads}, {batch.name}", "what": "pairs of peers", "error": 0, "passed": same}


def table(checks: list[dict], speeds: list[dict], rates: list[dict]) -> None:
    failed = [it for it in checks if not it["passed"]]
    worst: dict[str, float] = {}
    for it in checks:
        worst[it["what"]] = max(worst.get(it["what"], 0.0), it["error"])
    print(f"\nchecks: {len(checks)}, failed: {len(failed)}")
    print("largest errors: " + ", ".join(f"{k} {worst[k]:.1e}" for k in ("O", "LSE", "dQ", "dK", "dV") if k in worst))
    for it in failed:
        print(f"FAILED {it['check']}: {it['what']}, {it['error']:.2e}")
    if speeds:
        print(
            f"\n{'case':<58} {'pass':<8} {'kernel':<18} {'ms':>9} {'TFLOP/s':>8} {'of mm':>6} {'ratio':>6} {'det.':>6}"
        )
    for it in speeds:
        ratios = [f"{it[key]:6.2f}" if key in it else "     -" for key in ("ratio", "ratio_deterministic")]
        if it["kernel"].startswith("Cadre"):
            print(
                f"{it['case'][:58]:<58} {it['direction']:<8} {it['kernel']:<18} {it['seconds'] * 1e3:9.3f} "
                f"{it['tflops']:8.0f} {it['share_of_matmul']:6.2f} {' '.join(ratios)}"
            )

    for it in rates:
        print(f"copies of rows, {it['case']}: {it['gigabytes']:.0f} GB/s, {it['ratio']:.2f} of the device's memcpy")
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path.cwd())
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    unpack_wheels(asked.out / "packages" if asked.dry else Path("/tmp/cadre-gpu-packages"))
    import torch

    if not asked.dry and not torch.cuda.is_available():
        print("there is no GPU on this machine: nothing was run")
        return 3
    import correctness
    import end_to_end
    import rows
    from ours import Heads, Library

    library = Library(HERE / "libcadre_gpu.so", "cpu" if asked.dry else "cuda")
    device = "emulated" if asked.dry else torch.cuda.get_device_name()
    say(f"{device}, {library.processors} processors, torch {torch.__version__}, seed {asked.seed}")
    show_libraries_to_programs()
    checks: list[dict] = []
    speeds: list[dict] = []
    rates: list[dict] = []
    left_out: list[str] = []
    absent: dict[str, str] = {}
    result = {"device": device, "torch": torch.__version__, "seed": asked.seed, "dry": asked.dry}

    def store() -> None:
        result.update(checks=checks, speeds=speeds, rates=rates, left_out=left_out, absent_peers=absent)
        result.update(seconds=time.monotonic() - BEGAN)
        (asked.out / "gpu-check.json").write_text(json.dumps(result, indent=1) + "\n")

    def section(name: str, until: float, rows: Callable[[], Iterator[dict]], to: list[dict]) -> None:
        """Runs a section unless `until` seconds are over; a failure is a row, not the end."""
        if time.monotonic() - BEGAN > until:
            say(f"{name}: LEFT OUT, no time is left")
            left_out.append(name)
            return
        say(name)
        try:
            for row in rows():
                to.append(row)
                if not row.get("passed", True):
                    say(f"  FAILED {row['check']}: {row['what']} {row['error']:.2e}")
        except Exception as why:
            say(f"  FAILED: {type(why).__name__}: {why}")
            checks.append({"check": name, "what": f"{type(why).__name__}: {why}", "error": 1.0, "passed": False})
        store()

    limit = asked.seconds
    if asked.dry:
        section("batches of the bench", limit, dry_batches, checks)
    section("kernels against PyTorch", limit, lambda: correctness.check(library, asked.seed, asked.dry), checks)
    section("copies of rows", limit, lambda: rows.check(library, asked.seed, asked.dry), checks)
    section("tests of the Rust face", limit * 0.5, lambda: native_tests(asked.dry), checks)
    if not asked.dry:
        import speed

        peak = speed.matmul_peak()
        result["matmul_tflops"] = peak
        say(f"a bf16 product of 8192³ runs at {peak:.0f} TFLOP/s")

        def heads_of(dim: int) -> Heads:
            return Heads(16, 2, dim)

        todo = list(batches(heads_of))
        early = 8

        def one(make: Callable) -> None:
            batch = make()
            measure = lambda: speed.measure(library, batch, peak, say, absent)  # noqa: E731
            section(f"{batch.heads}, {batch.name}", limit * 0.95, measure, speeds)
            torch.cuda.empty_cache()

        for _, make in todo[:early]:
            one(make)
        section("rate of copies of rows", limit * 0.7, lambda: rows.measure(library), rates)
    steps, tokens = (1, 128) if asked.dry else (4, 2048)
    section("training runs", limit * 0.8, lambda: end_to_end.check(HERE, steps, tokens, 60.0), checks)
    if not asked.dry:
        section("cadre calibrate", limit * 0.9, lambda: calibrate(asked.out, peak), checks)
        for _, make in todo[early:]:
            one(make)
    store()
    table(checks, speeds, rates)
    for name, why in absent.items():
        print(f"peer {name} is not on this machine, so nothing is compared with it: {why}")
    if left_out:
        print(f"left out for want of time: {len(left_out)}: {'; '.join(left_out)}")
    return 1 if any(not it["passed"] for it in checks) else 0


def calibrate(out: Path, peak: float) -> Iterator[dict]:
    """The cost table of this GPU, as a file."""
    path = out / "calibration.json"
    words = ["--engine=gpu", "--head-dim=128", f"--linear-tflops={peak:.0f}", f"--out={path}"]
    command = [str(HERE / "cadre"), "calibrate", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    say(done.stdout.strip()[-600:])
    what = f"exit {done.returncode}"
    yield {"check": "cadre calibrate", "what": what, "error": float(done.returncode != 0), "passed": path.exists()}


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    code = main()
    sys.stdout.flush()
    # Handles of peers are freed by nobody in an order that all of them like.
    os._exit(code)
