"""Programs that may hang, die or flood: each in a session of its own, with an end, several at once.

In: `Work`s, the monotonic second at which all are over. Out: an `Ended` for every one, also for those that were never
begun. A program may tell things in a file of JSON lines; each is handed on as soon as it is whole, and a program that
tells nothing for longer than its silence is taken for hung. Output is kept in part, however much there is; a disk that
takes none of it costs the log, not the program. Does not judge what a program did.

Invariant: whatever a program started dies with it, in whatever process group, because sessions are killed whole; and no
wait here is longer than a tick.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import machine

TICK = 0.02
KEPT = 1 << 16  # bytes of the end of an output
LOGGED = 1 << 20  # bytes of its beginning that go to a log
TOLD = 1 << 22  # bytes of lines that are read at once
PRINTED = 16 << 20  # bytes of an output that goes to a file of its own
# A GPU's driver may take a while to let go of a killed process.
DYING = 8.0


@dataclass
class Work:
    name: str
    command: list[str]
    limit: float  # seconds
    silence: float = math.inf  # seconds without a line
    lines: Path | None = None  # what it tells
    stdout: Path | None = None  # instead of joining its errors
    log: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    first_silence: float = 0.0  # seconds more until the first line


@dataclass
class Ended:
    work: Work
    code: int | None  # none: never begun, or still there
    why: str  # empty where it ended by itself, with 0
    output: str = ""  # its last KEPT bytes
    seconds: float = 0
    out_of_time: bool = False  # by the end of all, not by its own limit


RUNNING: list[Session] = []


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            # After the name, which may hold anything: state, parent, group, session.
            state, _, _, of = stat.read_text(errors="replace").rsplit(")", 1)[1].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def chunks(pipe: IO[bytes]) -> Iterator[bytes]:
    """What is in a pipe now, a few MiB at most."""
    for _ in range(64):
        try:
            got = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not got:
            return
        yield got


def append(file: Path | None, content: bytes) -> None:
    if file and content:
        with contextlib.suppress(OSError), file.open("ab") as kept:
            kept.write(content)


def name_of(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return "of no name"


class Session:
    """One running program."""

    def __init__(self, work: Work, end: float, heard: Callable[[Work, dict], None]) -> None:
        self.work, self.call, self.began = work, heard, time.monotonic()
        self.heard, self.end = self.began + work.first_silence, min(end, self.began + work.limit)
        self.tail, self.logged, self.dropped, self.offset = b"", 0, 0, 0
        self.over, self.killed_at, self.out_of_time = "", 0.0, False
        for path in (work.lines, work.log, work.stdout):
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"")
        self.process = subprocess.Popen(
            work.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if work.stdout else subprocess.STDOUT,
            env={**os.environ, **work.environment},
            start_new_session=True,
            # Of a session of its own nobody else would take care where this process is killed.
            preexec_fn=machine.die_with_parent,
        )
        self.pipe = self.process.stderr or self.process.stdout
        self.printed = 0
        for it in (self.process.stdout, self.pipe):
            os.set_blocking(it.fileno(), False)
        RUNNING.append(self)

    def read(self) -> None:
        """Takes what has been printed; not without end, for others wait, too."""
        for got in chunks(self.pipe):
            self.tail = (self.tail + got)[-KEPT:]
            fits = got[: max(0, LOGGED - self.logged)]
            self.logged += len(fits)
            self.dropped += len(got) - len(fits)
            if fits:
                append(self.work.log, fits)
        if self.work.stdout:
            for got in chunks(self.process.stdout):
                append(self.work.stdout, got[: max(0, PRINTED - self.printed)])
                self.printed += len(got)

    def listen(self) -> None:
        """Hands on whole lines since the last call; what is no JSON is none."""
        if not self.work.lines or not self.work.lines.exists():
            return
        with self.work.lines.open("rb") as lines:
            lines.seek(self.offset)
            new = lines.read(TOLD)
        # A line without an end is none.
        whole = new[: new.rfind(b"\n") + 1] or (new if len(new) == TOLD else b"")
        self.offset += len(whole)
        for line in whole.splitlines():
            self.heard = time.monotonic()
            try:
                told = json.loads(line)
            except ValueError:
                continue
            self.call(self.work, told)

    def kill(self, why: str) -> None:
        if not self.killed_at:
            self.over, self.killed_at = why, time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for it in members(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(it, signal.SIGKILL)

    def gone(self) -> bool:
        """Ends what is due; true when the program is over."""
        now = time.monotonic()
        # Not reaped yet, so that nobody else gets its number while its session is killed.
        done = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if not done and not self.killed_at:
            if now >= self.end:
                self.out_of_time = self.end < self.began + self.work.limit
                self.kill(f"no end after {now - self.began:.0f} s, killed")
            elif now - self.heard > self.work.silence:
                self.kill(f"nothing new for {self.work.silence:.0f} s, killed")
        return done or (self.killed_at > 0 and now - self.killed_at > DYING)

    def ended(self) -> Ended:
        for it in members(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(it, signal.SIGKILL)
        self.read()
        code = self.process.poll()
        for it in (self.process.stdout, self.pipe):
            it.close()
        RUNNING.remove(self)
        why = self.over
        if code is None:
            why += f" and still there {DYING:.0f} s later"
        elif not why and code < 0:
            why = f"killed by signal {-code} ({name_of(-code)})"
        elif not why and code:
            why = f"exit {code}"
        if self.dropped:
            append(self.work.log, b"\n[... %d bytes are not kept; the end:]\n" % self.dropped + self.tail)
        seconds = time.monotonic() - self.began
        return Ended(self.work, code, why, self.tail.decode(errors="replace"), seconds, self.out_of_time)


def run(
    waiting: deque[Work], width: int, end: float, heard: Callable[[Work, dict], None] = lambda *_: None
) -> Iterator[Ended]:
    """Runs all, at most `width` at once; who takes an `Ended` may put further works into `waiting`."""
    running: list[Session] = []
    try:
        while waiting or running:
            while waiting and not running and time.monotonic() >= end:
                yield Ended(waiting.popleft(), None, "never begun", out_of_time=True)
            while waiting and len(running) < width and time.monotonic() < end:
                work = waiting.popleft()
                try:
                    running.append(Session(work, end, heard))
                except OSError as why:
                    yield Ended(work, None, f"could not be started: {why}")
            for it in list(running):
                it.read()
                gone = it.gone()
                it.listen()
                if gone:
                    running.remove(it)
                    yield it.ended()
            time.sleep(TICK)
    finally:
        for it in running:
            it.kill("its caller ended")


def one(work: Work, end: float, heard: Callable[[Work, dict], None] = lambda *_: None) -> Ended:
    return next(run(deque([work]), 1, end, heard))


def end_all() -> None:
    """Kills whatever runs, waits a moment for it to be gone, and hears what it had told."""
    end = time.monotonic() + DYING
    for it in list(RUNNING):
        it.kill("the whole was over")
    while any(it.process.poll() is None for it in RUNNING) and time.monotonic() < end:
        time.sleep(TICK)
    for it in RUNNING:
        it.listen()
    RUNNING.clear()
