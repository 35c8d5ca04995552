"""What the machine has: its GPU's driver, clocks and power, and the tools that see into a GPU. Starts nothing on the
GPU. And which of its Pythons has PyTorch.

In: the search path, nvidia-smi. Out: facts; the clocks of the moment, read beside everything else by one nvidia-smi
that runs all the time; paths of tools. What is missing is missing, not an error. Settings of the GPU are never
touched. Nothing here waits for nvidia-smi, which hangs where a driver is in trouble, and may not even be killed then.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
UUID = "uuid"
STATIC = {
    "name": "gpu",
    "driver_version": "driver",
    "power.limit": "power_limit_w",
    "clocks.max.sm": "max_sm_mhz",
    "memory.total": "memory_mib",
    # Before anything of this run is on it.
    "memory.used": "memory_used_mib",
    "utilization.gpu": "busy_percent",
    "compute_mode": "compute_mode",
}
MOVING = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "power_w", "temperature.gpu": "celsius"}
# Why clocks are what they are, in bits; an nvidia-smi that knows no such field is asked without.
REASONS = {"clocks_event_reasons.active": "clock_reasons"}
# Reasons that say that the GPU ran below its full speed.
HELD = {0x4: "its power limit", 0x8: "a hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "a power brake"}
EVERY_MS = 500
# More than a driver keeps for itself, and than a moment of it.
USED_MIB, BUSY_PERCENT = 2048, 10
# Seconds that a killed program may take to be gone; then it is left behind.
GONE = 0.3
DRIVER = Path("/proc/driver/nvidia/version")
LIBRARY = "libcuda.so.1"
# Where containers have the driver when it is on no search path.
DRIVERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")
# Folders of tools that are on no search path.
FOLDERS = (
    "usr/local/cuda*/bin",
    "usr/local/cuda*/compute-sanitizer",
    "usr/local/nvidia/bin",
    "opt/nvidia/nsight-compute/*",
)
# Where Pythons are that are on no search path, how many are asked, and for how many seconds: the call has an end.
PYTHONS = ("usr/local/bin", "usr/bin", "opt/*/bin", "opt/conda/envs/*/bin", "root/*/bin", "home/*/*/bin", "*/venv/bin")
ASKED, ASKED_S = 16, 8.0
# Variable that is set when another Python has taken over.
AGAIN = "CADRE_GPU_CHECK_AGAIN"
HAS_TORCH = """
import importlib.util, sys
sys.exit(sys.version_info < (3, 9) or importlib.util.find_spec("torch") is None)
"""


def python_with_torch() -> str | None:
    """Another Python of this machine that has PyTorch. None is asked for more than that; nothing is imported."""
    folders = [Path(it) for it in os.environ.get("PATH", "").split(":") if it]
    folders += [it for folder in PYTHONS for it in sorted(Path("/").glob(folder))]
    found = dict.fromkeys(str(it / name) for it in folders for name in ("python3", "python"))
    end = time.monotonic() + ASKED_S
    for python in [it for it in found if it != sys.executable and os.access(it, os.X_OK)][:ASKED]:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            asked = [python, "-c", HAS_TORCH]
            left = max(0.0, end - time.monotonic())
            if subprocess.run(asked, capture_output=True, check=False, timeout=left).returncode == 0:
                return python
    return None


def go_on_with_torch(program: Path) -> None:
    """Begins `program` again with a Python that has PyTorch, where this one has none: a call may be the only one."""
    # Whoever names a Python without its packages means it.
    if sys.flags.no_site or AGAIN in os.environ or importlib.util.find_spec("torch"):
        return
    if python := python_with_torch():
        print(f"{sys.executable} has no PyTorch, {python} has: it goes on with that", flush=True)
        os.environ[AGAIN] = "1"
        with contextlib.suppress(OSError):
            os.execv(python, [python, str(program), *sys.argv[1:]])


def found_here() -> dict:
    """Facts of the machine and of Python's packages, without importing any."""
    found = {"python": sys.version.split()[0]}
    for key, package in (("torch", "torch"), ("cudnn", "nvidia-cudnn-cu13")):
        # Whatever is wrong with a package that is there in part.
        with contextlib.suppress(Exception):
            found[key] = importlib.metadata.version(package)
    if "torch" in found and not any((Path(it) / "torch").is_dir() for it in sys.path):
        del found["torch"]
    return found | facts() | {"libraries": libraries()}


def tool(name: str) -> str | None:
    found = (str(it) for folder in FOLDERS for it in sorted(Path("/").glob(f"{folder}/{name}")))
    return shutil.which(name) or next(found, None)


def facts() -> dict:
    """Date; the driver's version where its kernel module tells it."""
    now = datetime.datetime.now(datetime.timezone.utc)
    found = {"date": now.strftime("%Y-%m-%d %H:%M UTC")}
    with contextlib.suppress(OSError):
        if version := re.search(r"\s(\d{3}\.\d+(\.\d+)?)\s", DRIVER.read_text(errors="replace")):
            found["driver"] = version[1]
    return found


def too_old(needed: str) -> str:
    """Words where programs that name symbols of glibc `needed` do not start here; none where that is not known."""
    has = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    with contextlib.suppress(ValueError):
        if [int(it) for it in has.split(".")] < [int(it) for it in needed.split(".")]:
            return f"its programs need glibc {needed}, this machine has {has}: they do not start; pack on one as old"
    return ""


def has_driver() -> bool:
    """Whether programs find the driver's library by themselves. A process of its own looks, and calls nothing of it."""
    command = [sys.executable, "-S", "-c", f"import ctypes; ctypes.CDLL({LIBRARY!r})"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0
    return False


def libraries() -> list[str]:
    """Folders of the driver and of the cuBLASLt that Python's packages carry, for programs that are no Python.

    Those of the driver only where it is on no search path: one that containers have to be newer than the machine's
    (forward compatibility) would be hidden by the machine's.
    """
    drivers = [it for it in map(Path, DRIVERS) if any(it.glob(LIBRARY))]
    drivers = [] if drivers and has_driver() else drivers
    packages = [
        lib for it in sys.path if it for lib in Path(it).glob("nvidia/*/lib") if any(lib.glob("libcublasLt.so*"))
    ]
    return [str(it) for it in (*drivers, *packages)]


def exclusive(facts: dict) -> bool:
    """Whether one process at a time may have the GPU."""
    return facts.get("compute_mode", "") == "Exclusive_Process"


def used_by_others(facts: dict) -> str:
    """Words where the GPU was in use before this run began."""
    with contextlib.suppress(KeyError, ValueError):
        used, busy = float(facts["memory_used_mib"]), float(facts["busy_percent"])
        if used > USED_MIB or busy > BUSY_PERCENT:
            before = f"{used:.0f} MiB, {busy:.0f} % busy before this run"
            return f"others use this GPU ({before}): times are of less than all of it"
    return ""


class Beside:
    """A program that runs beside everything else and dies with it; nothing where it cannot be started."""

    def __init__(self, command: list[str], file: Path) -> None:
        self.file, self.process = file, None
        with contextlib.suppress(OSError), file.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def lines(self) -> list[str]:
        """The complete lines that the program has printed so far."""
        with contextlib.suppress(OSError):
            return self.file.read_text(errors="replace").rpartition("\n")[0].splitlines()
        return []

    def end(self) -> None:
        if self.process:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GONE)


def own(rows: list[list[str]], uuid: str) -> list[str] | None:
    """The newest row of the GPU that is used; each ends with its UUID. None where nobody knows which of several is."""
    those = [it for it in rows if uuid and it[-1].removeprefix("GPU-") == uuid.removeprefix("GPU-")]
    if those:
        return those[-1]
    return rows[-1] if len({it[-1] for it in rows}) == 1 else None


class Card(Beside):
    """What nvidia-smi says of the GPU that is used, once it does; `uuid` is empty until that is known."""

    def __init__(self, file: Path, uuid: Callable[[], str] = str) -> None:
        self.uuid = uuid
        asked = [f"--query-gpu={','.join([*STATIC, UUID])}", "--format=csv,noheader,nounits"]
        super().__init__([tool("nvidia-smi") or "nvidia-smi", *asked], file)

    def now(self) -> dict:
        if self.process is None:
            return {"clocks": "unknown: there is no nvidia-smi"}
        if self.process.poll() is None:
            return {"clocks": "unknown: nvidia-smi does not answer"}
        rows = table(self.lines(), len(STATIC) + 1)
        if row := own(rows, self.uuid()):
            return dict(zip(STATIC.values(), row))
        if rows:
            return {"clocks": f"unknown: there are {len(rows)} GPUs, and it is not known which is used"}
        return {"clocks": "unknown: nvidia-smi fails"}


class Clocks(Beside):
    """The last line of an nvidia-smi that prints the clocks again and again; nothing without one, or where it is not
    known which of several GPUs is used."""

    def __init__(self, file: Path, uuid: Callable[[], str] = str) -> None:
        self.uuid = uuid
        self.ask(MOVING | REASONS, file)

    def ask(self, fields: dict[str, str], file: Path) -> None:
        self.fields = fields
        asked = [f"--query-gpu={','.join([*fields, UUID])}", "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"]
        super().__init__([tool("nvidia-smi") or "nvidia-smi", *asked], file)

    def now(self) -> dict:
        rows, uuid = table(self.lines(), len(self.fields) + 1), self.uuid()
        if not rows and self.fields != MOVING and self.process and self.process.poll() is not None:
            self.ask(MOVING, self.file)
        # The first of several may be the only one that is printed yet.
        row = own(rows, uuid) if uuid or len(rows) > 1 else None
        return dict(zip(self.fields.values(), row)) if row else {}


def held_down(rows: list[dict], most: str) -> str:
    """Clocks that rows of times were measured at, and what kept them low; nothing where no row says."""
    clocks, reasons = [], []
    for it in (row.get("provenance", {}) for row in rows):
        with contextlib.suppress(KeyError, ValueError):
            clocks.append(int(it["sm_mhz"]))
        with contextlib.suppress(KeyError, ValueError):
            bits = int(it["clock_reasons"], 0)
            reasons.append({words for bit, words in HELD.items() if bits & bit})
    if not clocks:
        return ""
    low = f"clocks while timed: {min(clocks)} to {max(clocks)} MHz{f' of {most}' if most else ''}"
    if held := sorted(set().union(*reasons)):
        low += f", held down by {' and '.join(held)} in {sum(map(bool, reasons))} of {len(reasons)} rows"
    return low


def table(lines: list[str], columns: int) -> list[list[str]]:
    rows = [[word.strip() for word in it.split(",")] for it in lines]
    return [it for it in rows if len(it) == columns]


def die_with_parent() -> None:
    """Before a program begins: it gets SIGKILL when this process ends, however that is."""
    if LIBC:
        LIBC.prctl(1, signal.SIGKILL)
