"""What comes back: nothing but gpu-check.json, calibration.json, trace.json and one archive of logs.

In: the folder where everything is written, which is none of the output. Out: DIR/logs.tar.gz, whole at any moment, at
most MOST bytes: of large logs the beginning and the end, small ones first. What a program wrote comes back whole or not
at all. A folder that takes no more costs the file, not the run. A run that is killed while it writes may leave the file
that it wrote, `.NAME.new`; the next run in that folder removes it.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile
from pathlib import Path

NAMES = ("gpu-check.json", "calibration.json", "trace.json", "logs.tar.gz")
MOST = 12 << 20  # of the archive, before compression
ONE = 1 << 20  # of a log


# Of a file that comes back from a lent machine.
LARGEST = 15 << 20


def clear(out: Path) -> None:
    """Removes what an earlier run left; never anything else."""
    for name in (*NAMES, *(f".{it}.new" for it in NAMES)):
        with contextlib.suppress(OSError):
            (out / name).unlink()


def whole(path: Path, out: Path) -> str:
    """Puts a file that is complete into the output; words if it could not."""
    new = out / f".{path.name}.new"
    try:
        if path.stat().st_size > LARGEST:
            return f"{path.name} has {path.stat().st_size >> 20} MiB: it is not kept"
        shutil.copyfile(path, new)
        new.replace(out / path.name)
    except OSError as why:
        with contextlib.suppress(OSError):
            new.unlink()
        return f"{path.name} cannot be written: {why.strerror}"
    return ""


def cut(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= ONE:
            return file.read()
        head = file.read(ONE // 2)
        file.seek(size - ONE // 2)
        return head + b"\n[... %d bytes are not kept ...]\n" % (size - ONE) + file.read()


def archive(work: Path, out: Path) -> str:
    """Packs the files below `work`; words if it could not."""
    whole = out / ".logs.tar.gz.new"
    room = MOST
    try:
        files = sorted((it for it in work.rglob("*") if it.is_file()), key=lambda it: it.stat().st_size)
        with tarfile.open(whole, "w:gz", compresslevel=6) as pack:
            for file in files:
                content = cut(file)
                room -= len(content)
                if room < 0:
                    break
                entry = tarfile.TarInfo(str(file.relative_to(work)))
                entry.size = len(content)
                pack.addfile(entry, io.BytesIO(content))
        whole.replace(out / "logs.tar.gz")
    except OSError as why:
        with contextlib.suppress(OSError):
            whole.unlink()
        return f"logs.tar.gz cannot be written: {why.strerror}"
    return ""
