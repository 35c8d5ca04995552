"""The pack before anything of it runs: whole, readable, runnable; and room for what is written meanwhile.

In: the folder of this file, as `scripts/gpu-check` packs it. Out: words of what is wrong with it, each with what to do;
paths of its programs. Nothing here raises: a pack that is wrong in part is run in part.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = ("cadre", "cadre-gpu-probe", "device-tests", "exchange-tests")
# Bytes that logs, unpacked wheels and copies of programs may need.
ROOM = 256 << 20
MEMORY = Path("/dev/shm")
# Where programs are that could not be made runnable in the pack.
COPIES: dict[str, Path] = {}


def program(name: str) -> Path:
    return COPIES.get(name, HERE / name)


def facts() -> tuple[dict, str]:
    """What the pack says of itself; words if it says nothing."""
    try:
        return json.loads((HERE / "pack.json").read_text(encoding="utf-8")), ""
    except (OSError, ValueError) as why:
        return {"commit": "unknown"}, f"pack.json cannot be read ({why}): copy the pack again; numbers have no commit"


def wrong_files(facts: dict) -> list[str]:
    """Files that are not as they were packed."""
    found = []
    for name, (size, digest) in facts.pop("files", {}).items():
        path = HERE / name
        try:
            content = path.read_bytes()
        except OSError as why:
            found.append(f"{name} cannot be read ({why.strerror})")
            continue
        if len(content) != size:
            found.append(f"{name} has {len(content)} bytes of {size}")
        elif hashlib.sha256(content).hexdigest()[: len(digest)] != digest:
            found.append(f"{name} has other bytes")
    return found


def make_runnable(work: Path) -> list[str]:
    """Programs of a pack that came by something which carries no modes; copies, where nothing may be changed."""
    found = []
    for name in PROGRAMS:
        path = HERE / name
        if not path.exists() or os.access(path, os.X_OK):
            continue
        with contextlib.suppress(OSError):
            path.chmod(0o755)
            continue
        try:
            copy = work / "programs" / name
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
            copy.chmod(0o755)
            COPIES[name] = copy
        except OSError as why:
            found.append(f"{name} cannot be started and not be copied ({why.strerror}): make it executable")
    return found


def unpack_wheels(folder: Path) -> list[str]:
    """Wheels of peers that the machine's Python may lack, and of Cadre's own package."""
    found = []
    for wheel in sorted((HERE / "wheels").glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as why:
            # The last two of a Python that lacks a way to compress.
            found.append(f"{wheel.name} cannot be unpacked ({why}): what it is for will be missing")
    return found


def working_folder() -> Path | None:
    """Where logs go meanwhile: the first place with room, else that with the most; none where no place takes a file."""
    places: dict[str, int] = {}
    with contextlib.suppress(OSError):
        places[tempfile.gettempdir()] = 0
    for place in (*places, str(MEMORY), os.curdir):
        with contextlib.suppress(OSError):
            places[place] = shutil.disk_usage(place).free
    for place in sorted(places, key=lambda it: -min(places[it], ROOM)):
        with contextlib.suppress(OSError):
            found = Path(tempfile.mkdtemp(prefix="cadre-gpu-check-", dir=place)).absolute()
            (found / "logs").mkdir()
            # Whatever asks for such a folder from now on gets it here.
            tempfile.tempdir = str(found)
            return found
    return None


def alone(*paths: Path) -> tuple[list[int], str]:
    """Holds the pack and the output for this run; words where another run has them."""
    held = []
    for path in paths:
        try:
            held.append(os.open(path, os.O_RDONLY))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return held, f"another run uses {path}: two at once disturb each other's times; wait for its end"
        except OSError:
            # Not there, or of a file system without locks.
            continue
    return held, ""
