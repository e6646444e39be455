"""TensorBoard's event files, read without TensorBoard: length-prefixed records with masked checksums."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event


class Scalar(NamedTuple):
    tag: str
    step: int
    time: float
    value: float


def events(path: Path) -> list[Any]:
    """All events of a file; every checksum must match."""
    data, found = path.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + size]
        checksums = data[8:12] + data[12 + size : 16 + size]
        assert (_masked(data[:8]), _masked(body)) == struct.unpack("<II", checksums)
        found.append(Event.FromString(body))
        data = data[16 + size :]
    return found


def scalars(folder: Path) -> list[Scalar]:
    """What TensorBoard shows of a folder: a file that starts at a step hides later steps in earlier files."""
    shown: list[Scalar] = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in events(path):
            if event.session_log.status == 1:  # START
                shown = [scalar for scalar in shown if scalar.step < event.step]
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    shown.append(Scalar(value.tag, event.step, event.wall_time, value.simple_value))
    return shown


def texts(folder: Path) -> dict[str, str]:
    """The newest text of each tag."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in events(path):
            found |= {v.tag: v.tensor.string_val[0].decode() for v in event.summary.value if v.tensor.string_val}
    return found


def images(folder: Path) -> dict[str, tuple[int, int, int]]:
    """(step, height, width) of the newest picture of each tag, a PNG."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in events(path):
            for value in event.summary.value:
                if value.WhichOneof("value") == "image":
                    assert value.image.encoded_image_string.startswith(b"\x89PNG")
                    found[value.tag] = event.step, value.image.height, value.image.width
    return found


def _masked(data: bytes) -> int:
    value = crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
