"""The messages and methods of control.proto, and conversions from a RunView to a Status and from a message to JSON.

The classes are created at import from control.binpb, the compiled control.proto, with whatever protobuf is installed.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

from pentad.orchestrator.monitoring.run_state import RunView

SERVICE = "pentad.v1.Control"
ENDPOINT = "control.json"  # in the folder of a live run: where its service listens, and the token
MAX_MESSAGE_BYTES = 4 << 20


class Method(NamedTuple):
    """A method of a service, at the path /service/name; `streams`: whether it answers with a stream."""

    service: str
    name: str
    request: Any
    response: Any
    streams: bool


def _compiled() -> tuple[dict[str, Any], tuple[Method, ...]]:
    """Message classes by name, and the methods, in a descriptor pool of their own, because a user's stubs may define
    the same ones."""
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("control.binpb").read_bytes())
    (file,) = files.file
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    classes = message_factory.GetMessageClassesForFiles([file.name], pool)
    (service,) = file.service
    methods = tuple(
        Method(SERVICE, m.name, classes[m.input_type[1:]], classes[m.output_type[1:]], m.server_streaming)
        for m in service.method
    )
    return {name.rpartition(".")[2]: made for name, made in classes.items()}, methods


MESSAGES, METHODS = _compiled()


def status_of(view: RunView) -> Any:
    """The Status of a view, with the current ages of heartbeats."""
    facts, now = view._asdict(), time.monotonic()
    for name in ("loss", "tokens_per_second", "seconds_left"):
        if facts[name] is not None and not math.isfinite(facts[name]):
            facts[name] = None
    facts["ranks"] = ranks = [rank._asdict() for rank in view.ranks]
    facts["evaluations"] = [each._asdict() for each in view.evaluations]
    for rank in ranks:
        rank["coordinates"] = rank["coordinates"]._asdict()
        rank["heartbeat_age_seconds"] = round(max(0.0, now - rank.pop("heartbeat")), 3)
    return MESSAGES["Status"](**facts)


def plain(message: Any) -> dict[str, Any]:
    """A message as a JSON object with the names of control.proto; an absent optional field is None."""
    facts: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            facts[field.name] = None if field.has_presence and not message.HasField(field.name) else value
        elif field.message_type.GetOptions().map_entry:
            facts[field.name] = dict(sorted(value.items()))  # a map has no order
        elif hasattr(value, "DESCRIPTOR"):
            facts[field.name] = plain(value)
        else:
            facts[field.name] = [plain(part) for part in value]
    return facts
