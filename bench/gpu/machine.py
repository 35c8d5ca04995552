"""What the machine has: its GPU's driver, clocks and power, and the tools that see into a GPU. Starts nothing on the
GPU.

In: the search path, nvidia-smi. Out: facts; the clocks of the moment, read beside everything else by one nvidia-smi
that runs all the time; paths of tools. What is missing is missing, not an error. Settings of the GPU are never
touched.
"""

import contextlib
import ctypes
import datetime
import shutil
import signal
import subprocess
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
STATIC = ("name", "driver_version", "power.limit", "clocks.max.sm", "memory.total")
MOVING = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "power_w", "temperature.gpu": "celsius"}
EVERY_MS = 500
# Where containers have the driver when it is on no search path.
DRIVERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")
# Folders of tools that are on no search path.
FOLDERS = ("usr/local/cuda*/bin", "opt/nvidia/nsight-compute/*")


def tool(name: str) -> str | None:
    found = (str(it) for folder in FOLDERS for it in sorted(Path("/").glob(f"{folder}/{name}")))
    return shutil.which(name) or next(found, None)


def facts() -> dict:
    """Driver, power limit and date; `nvidia-smi` is there or not."""
    found: dict = {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")}
    program = tool("nvidia-smi")
    if not program:
        return found | {"clocks": "unknown: there is no nvidia-smi"}
    command = [program, f"--query-gpu={','.join(STATIC)}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
        words = [it.strip() for it in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
        if len(words) == len(STATIC):
            keys = ("gpu", "driver", "power_limit_w", "max_sm_mhz", "memory_mib")
            return found | dict(zip(keys, words, strict=True))
    return found | {"clocks": "unknown: nvidia-smi does not answer"}


def libraries() -> list[str]:
    """Folders of the driver and of the cuBLASLt that Python's packages carry, for programs that are no Python."""
    found = []
    folders = [*(Path(it) for it in DRIVERS), *(lib for it in sys.path if it for lib in Path(it).glob("nvidia/*/lib"))]
    for folder in folders:
        if any(folder.glob("libcuda.so.1")) or any(folder.glob("libcublasLt.so*")):
            found.append(str(folder))
    return found


class Clocks:
    """The last line of an nvidia-smi that prints the clocks again and again; nothing without one."""

    def __init__(self, file: Path) -> None:
        self.file, self.process = file, None
        program = tool("nvidia-smi")
        if program:
            command = [program, f"--query-gpu={','.join(MOVING)}", "--format=csv,noheader,nounits", f"-lms={EVERY_MS}"]
            with contextlib.suppress(OSError), file.open("wb") as out:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.DEVNULL,
                    preexec_fn=die_with_parent,
                )

    def now(self) -> dict:
        with contextlib.suppress(OSError):
            whole = self.file.read_text(errors="replace").rsplit("\n", 1)[0].splitlines()
            words = [it.strip() for it in whole[-1].split(",")] if whole else []
            if len(words) == len(MOVING):
                return dict(zip(MOVING.values(), words, strict=True))
        return {}

    def end(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()


def die_with_parent() -> None:
    """Before a program begins: it gets SIGKILL when this process ends, however that is."""
    if LIBC:
        LIBC.prctl(1, signal.SIGKILL)
