"""What comes back: nothing but gpu-check.json, calibration.json, trace.json and one archive of logs.

In: the folder where everything is written, which is none of the output. Out: DIR/logs.tar.gz, whole at any moment, at
most LARGEST bytes: of large logs the beginning and the end, small ones first, at most MOST bytes of them; then core
dumps and inputs (*.core, *.given), small ones first, each whole and compressed as NAME.gz, or left out and named in
left-out.txt. What else a program wrote comes back whole or not at all. A folder that takes no more costs the file, not
the run. A run that is killed while it writes may leave the file that it wrote, `.NAME.new`; the next run in that folder
removes it.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile
import zlib
from pathlib import Path

NAMES = ("gpu-check.json", "calibration.json", "trace.json", "logs.tar.gz")
MOST = 12 << 20  # of the archive, before compression
ONE = 1 << 20  # of a log
# Files that are useless when they are cut, so they come back whole or not at all.
WHOLE = (".core", ".given")
LEFT_OUT = "left-out.txt"
# Bytes of the archive that are none of its files': headers, its end, what is not written yet.
REST = 512 << 10

# Of a file that comes back from a lent machine.
LARGEST = 15 << 20


def clear(out: Path) -> None:
    """Removes what an earlier run left; never anything else."""
    for name in NAMES:
        with contextlib.suppress(OSError):
            (out / name).unlink()
    tidy(out)


def tidy(out: Path) -> None:
    """Removes what a program left that was killed while it wrote."""
    for name in NAMES:
        with contextlib.suppress(OSError):
            (out / f".{name}.new").unlink()


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


def packed(path: Path, most: int) -> bytes | None:
    """A file as gzip has it; none where that has more than `most` bytes."""
    gzip, found, size = zlib.compressobj(1, wbits=31), [], 0
    with path.open("rb") as file:
        while piece := file.read(ONE):
            found.append(gzip.compress(piece))
            size += len(found[-1])
            if size > most:
                return None
    found.append(gzip.flush())
    return b"".join(found) if size + len(found[-1]) <= most else None


def fits(path: Path) -> bool:
    """Whether a file that is kept whole comes back, if it is the only one."""
    return packed(path, LARGEST - MOST // 4 - REST) is not None


def put(pack: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    pack.addfile(entry, io.BytesIO(content))


def archive(work: Path, out: Path) -> str:
    """Packs the files below `work`; words if it could not."""
    whole = out / ".logs.tar.gz.new"
    room = MOST
    try:
        files = sorted((it for it in work.rglob("*") if it.is_file()), key=lambda it: it.stat().st_size)
        with whole.open("wb") as out_file, tarfile.open(fileobj=out_file, mode="w:gz", compresslevel=6) as pack:
            for file in (it for it in files if it.suffix not in WHOLE):
                content = cut(file)
                room -= len(content)
                if room < 0:
                    break
                put(pack, str(file.relative_to(work)), content)
            left, room = [], LARGEST - out_file.tell() - REST
            for file in (it for it in files if it.suffix in WHOLE):
                name = str(file.relative_to(work))
                content = packed(file, room)
                if content is None:
                    left.append(f"{name}, {file.stat().st_size} bytes: no room for all of it\n")
                else:
                    put(pack, f"{name}.gz", content)
                    room -= len(content) + (len(content) >> 10)
            if left:
                put(pack, LEFT_OUT, "".join(left).encode())
        whole.replace(out / "logs.tar.gz")
    except OSError as why:
        with contextlib.suppress(OSError):
            whole.unlink()
        return f"logs.tar.gz cannot be written: {why.strerror}"
    return ""
