"""The disk of run.folder, where checkpoints go: whether it can be written, and how fast it is."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pentad.orchestrator.doctor.finding import Finding, Subject
from pentad.orchestrator.planning.formatting import format_bytes, format_duration

BLOCK, BLOCKS = 2**22, 64  # bytes, and how many blocks are written: 256 MiB, or what fits into SECONDS
SECONDS = 3.0
FSYNCS = 5
LITTLE = 10 * 2**30  # bytes free
SLOW = 100e6  # bytes/s; the state of 70 M parameters takes 10 s
SLOW_FSYNC = 0.1  # seconds


class Speed(NamedTuple):
    """Bytes/s of writing, including the final fsync, and of reading past the page cache (None if it cannot be
    bypassed); seconds of an fsync after a write of 4 KiB; bytes free."""

    write: float
    read: float | None
    fsync: float
    free: int


def examine_disk(subject: Subject) -> Finding:
    folder = Path(subject.config.run.folder)
    try:
        speed = measure(existing(folder))
    except OSError as error:
        text = f"run.folder is '{folder}', which cannot be written ({error.strerror or error})"
        return Finding("failure", text, "choose another run.folder, or mend its permissions or mount")
    return judge_disk(speed)


def existing(folder: Path) -> Path:
    """The folder, or the nearest existing one above it, where it would be created."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def judge_disk(speed: Speed) -> Finding:
    read = "" if speed.read is None else f", read {_rate(speed.read)}"
    text = f"write {_rate(speed.write)}{read}, fsync {format_duration(speed.fsync)}, {format_bytes(speed.free)} free"
    figures = speed._asdict()
    if speed.free < LITTLE:
        return Finding("warning", text, "free some space: a full disk ends checkpoints", figures)
    if min(speed.write, speed.read or speed.write) < SLOW:
        remedy = "use a faster disk for run.folder, or checkpoint.path, an object store"
        return Finding("warning", f"{text}: slow for checkpoints", remedy, figures)
    if speed.fsync > SLOW_FSYNC:
        remedy = "keep other programs from writing there, or use another disk: each checkpoint waits for several"
        return Finding("warning", text, remedy, figures)
    return Finding("ok", text, figures=figures)


def measure(folder: Path) -> Speed:
    """Measures by writing, reading and removing a file in `folder`. Raises OSError."""
    free = shutil.disk_usage(folder).free
    block = mmap.mmap(-1, BLOCK)  # page-aligned, as direct I/O requires
    block.write(os.urandom(BLOCK))
    handle, name = tempfile.mkstemp(prefix=".pentad-doctor-", dir=folder)
    try:
        written, began = 0, time.monotonic()
        room = min(BLOCKS, free // (2 * BLOCK))
        while written < room * BLOCK and time.monotonic() < began + SECONDS:
            written += os.write(handle, block)
        os.fsync(handle)
        write = written / (time.monotonic() - began)
        read = _read_directly(name, block)
        fsync = min(_seconds_of_fsync(handle) for _ in range(FSYNCS))
    finally:
        os.close(handle)
        with suppress(OSError):
            os.unlink(name)
    return Speed(write, read, fsync, free)


def _read_directly(name: str, block: mmap.mmap) -> float | None:
    """Bytes/s of reading the file; None on a file system or operating system without direct I/O."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return None
    try:
        total, began = 0, time.monotonic()
        while time.monotonic() < began + SECONDS and (got := os.readv(handle, [block])):
            total += got
        return total / (time.monotonic() - began)
    except OSError:
        return None
    finally:
        os.close(handle)


def _seconds_of_fsync(handle: int) -> float:
    began = time.monotonic()
    os.pwrite(handle, os.urandom(4096), 0)
    os.fsync(handle)
    return time.monotonic() - began


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.2g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"
