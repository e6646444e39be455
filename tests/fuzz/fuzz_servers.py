"""What others send to a run: requests to its control service, to the server of copies in memory, and for metrics."""

from __future__ import annotations

import itertools
import json
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
from controls import serving
from damage import damaged_bytes
from fuzz_damage import damaged_tree
from fuzz_readers import TEXT, Reader

from pentad.orchestrator.control.control_messages import METHODS
from pentad.orchestrator.monitoring.metrics_server import MetricsServer
from pentad.schedules.ir.errors import PentadError
from pentad.workers.replication.parts import CopyKey, HostCopies
from pentad.workers.replication.transfer import CopyServer

TOKEN = bytes(32)


@contextmanager
def control_calls(folder: Path) -> Iterator[Reader]:
    """Requests to the control service; the first byte selects the method, the second one the token. None names the
    run's generation, so that even those that parse are refused."""
    with serving(folder) as served:
        host = served.endpoint["address"]
        options = (("grpc.enable_http_proxy", 0),)
        with grpc.insecure_channel(host, options=options) as channel:
            calls = [channel.unary_stream(f"/{each.service}/{each.name}") for each in METHODS]
            tokens = [served.endpoint["token"], "wrong", "", "x" * 5000]

            def read(content: bytes) -> None:
                content = content.ljust(2, b"\0")
                call, token = calls[content[0] % len(calls)], tokens[content[1] % len(tokens)]
                try:
                    answers = call(
                        b"\x08\x63" + content[2:], timeout=5, metadata=(("authorization", f"Bearer {token}"),)
                    )
                    with suppress(StopIteration):
                        next(answers)
                    answers.cancel()
                except grpc.RpcError as error:
                    if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                        raise
                    raise PentadError(error.details()) from None

            read(b"\0\0")
            yield Reader((bytes(8), b"\x01\x00\x08\x05\x12\x03abc"), (_random_bytes, damaged_bytes), read)


@contextmanager
def copy_requests(folder: Path) -> Iterator[Reader]:
    """Messages to the server of copies in memory, most of them after its token."""
    copies = HostCopies()
    server = CopyServer(copies, "127.0.0.1", TOKEN)
    key, part = CopyKey(1, 4, 2), np.arange(64, dtype=np.uint8)

    def message(request: Any, after: bytes = b"") -> bytes:
        text = json.dumps(request).encode()
        return len(text).to_bytes(8, "little") + text + after

    put = {
        "do": "put",
        "key": key,
        "owner": 0,
        "bytes": 64,
        "index": {"a": {"b": [{"dtype": "F32", "shape": [16]}, 0]}},
    }
    chunk = {"do": "chunk", "room": 0, "start": 0, "bytes": 64}
    get = {"do": "get", "key": key, "owner": 0, "start": 0, "bytes": 64}
    after = part.tobytes() + zlib.crc32(part.tobytes()).to_bytes(4, "little")
    seeds = [(b"", put, b""), (message(put), chunk, after), (message(put) + message(chunk, after), get, b"")]

    def requests(data: bytes, seed: int) -> bytes:
        """Damaged JSON with its length, after valid requests."""
        before, request, its = next(each for each in seeds if data == TOKEN + each[0] + message(*each[1:]))
        changed = damaged_tree(json.dumps(request).encode(), seed)
        return TOKEN + before + len(changed).to_bytes(8, "little") + changed + its

    def read(content: bytes) -> None:
        server.server.numbers = itertools.count()
        _send(server.address, content)
        copies.forget()
        copies.spare.clear()

    try:
        whole = tuple(TOKEN + before + message(request, its) for before, request, its in seeds)
        yield Reader(whole, (requests, requests, damaged_bytes), read)
    finally:
        server.close()


def _send(address: str, content: bytes) -> None:
    """Sends to a server and reads its whole answer."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as peer:
        peer.settimeout(20)
        with suppress(OSError):  # the server has closed the connection
            peer.sendall(content)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(1 << 16):
                pass


@contextmanager
def scrapes(folder: Path) -> Iterator[Reader]:
    """Requests to the metrics server."""

    class Nothing:
        def collect(self) -> Iterator[Any]:
            return iter(())

    server = MetricsServer(Nothing(), "127.0.0.1", 0, lambda: True)

    def read(content: bytes) -> None:
        _send(server.address, content)

    intact = (b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n", b"GET /metrics?name[]=up HTTP/1.0\r\n\r\n")
    try:
        yield Reader(intact, TEXT, read)
    finally:
        server.close()


def _random_bytes(_: bytes, seed: int) -> bytes:
    random = Random(seed)
    return random.randbytes(2 + random.randrange(64))
