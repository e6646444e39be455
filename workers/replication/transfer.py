"""Moves parts between processes, over TCP connections of their own.

Neither side takes part in a collective, so a transfer can neither block one nor be blocked by one; if either process
dies, the other one gets an error. Whoever connects first sends the run's token, 32 bytes, and then requests, as JSON
after its length:

    put     announces a part; the answer has the number of the room for it, which lasts as long as the connection
    chunk   announces bytes for a room; they follow, and then their CRC-32, 4 bytes, little-endian; the answer to the
            last chunk of a part says that the part has been stored
    get     asks for bytes of a part, which follow the answer

The chunks of a part travel over several connections, since one thread cannot keep a fast network busy; each connection
takes the next chunk once its last has arrived. What is read back from memory is not verified.

The threads that move bytes share the GIL with the one that trains, so each system call moves a full chunk.
"""

from __future__ import annotations

import hmac
import itertools
import json
import socket
import socketserver
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.safetensors_header import Stored
from pentad.workers.replication.parts import CopyKey, CopyPart, HostCopies, Index

Check = Callable[[], None]  # raises if the transfer has become pointless

CHUNK_BYTES = 16 << 20
CONNECTIONS = 4  # connections per part
POLL_SECONDS = 0.2  # between checks while nothing moves
CONNECT_SECONDS = 5.0
IDLE_SECONDS = 60.0  # after so long without a byte, a connection is given up
TOKEN_BYTES = 32
MAX_REQUEST = 64 << 20  # bytes
_LENGTH, _CRC, _TIMEVAL = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct("@ll")
_FOREIGN = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # raised when foreign requests are read


class _Ended(ConnectionError):
    """The peer has ended the connection between two messages."""


def _nothing() -> None:
    """The check of a server, whose transfers end with their connections."""


class CopyServer:
    """Serves the parts of `copies`, and accepts those of other ranks, at `address`, 'HOST:PORT'."""

    def __init__(self, copies: HostCopies, host: str, token: bytes) -> None:
        self.server, self.token = _Server((host, 0), _Handler), token
        self.server.copies, self.server.token = copies, token
        self.address = f"{host}:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(POLL_SECONDS,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def send_part(
    address: str, token: bytes, key: CopyKey, owner: int, index: Index, data: np.ndarray, check: Check
) -> None:
    """Stores a rank's part in the process at `address`, where it is on return. Raises OSError if that fails, and what
    `check` raises meanwhile, in any thread."""
    request = {"do": "put", "key": key, "owner": owner, "bytes": data.nbytes, "index": index}
    chunks = range(0, data.nbytes, CHUNK_BYTES)
    left = iter(chunks)

    def send_chunks(room: int, connection: AbstractContextManager[socket.socket]) -> None:
        try:
            with connection as peer:
                for start in left:
                    chunk = data.data[start : start + CHUNK_BYTES]
                    _send_message(peer, {"do": "chunk", "room": room, "start": start, "bytes": chunk.nbytes}, check)
                    _send(peer, chunk, check)
                    _send(peer, _CRC.pack(zlib.crc32(chunk)), check)
                    _receive_answer(peer, check)
        except BaseException:
            for _ in left:  # the part has failed: no thread continues
                pass
            raise

    with _connected(address, token) as peer, ThreadPoolExecutor(CONNECTIONS) as threads:
        _send_message(peer, request, check)
        room = _receive_answer(peer, check)["room"]
        others = [threads.submit(send_chunks, room, _connected(address, token)) for _ in chunks[1:CONNECTIONS]]
        send_chunks(room, nullcontext(peer))
        for each in others:
            each.result()


class RemotePart:
    """A part in another process as a file, from which `readinto` reads."""

    def __init__(self, peer: socket.socket, key: CopyKey, owner: int, check: Check) -> None:
        self.peer, self.key, self.owner, self.check, self.at = peer, key, owner, check, 0

    def seek(self, at: int) -> None:
        self.at = at

    def readinto(self, target: np.ndarray) -> int:
        request = {"do": "get", "key": self.key, "owner": self.owner, "start": self.at, "bytes": target.nbytes}
        _send_message(self.peer, request, self.check)
        _receive_answer(self.peer, self.check)
        _receive(self.peer, target.data, self.check)
        self.at += target.nbytes
        return target.nbytes


@contextmanager
def open_remote(address: str, token: bytes, key: CopyKey, owner: int, check: Check) -> Iterator[RemotePart]:
    """A part in the process at `address`. Raises OSError, also while it is read, if the process is gone or no longer
    has the part."""
    with _connected(address, token) as peer:
        yield RemotePart(peer, key, owner, check)


@contextmanager
def _connected(address: str, token: bytes) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), CONNECT_SECONDS) as peer:
        _set_up(peer)
        peer.sendall(token)
        yield peer


def _set_up(peer: socket.socket) -> None:
    """Makes system calls return after POLL_SECONDS with what they have moved so far. With Python's own timeouts they
    would return as soon as they had moved anything."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds, part = divmod(POLL_SECONDS, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(part * 1e6)))


@dataclass
class _Room:
    """Memory for a part of which `missing` bytes have not arrived. Whoever stores the last of them hands the part to
    the copies."""

    key: CopyKey
    owner: int
    index: Index
    data: np.ndarray
    missing: int


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128
    copies: HostCopies
    token: bytes

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rooms, self.changing, self.numbers = dict[int, _Room](), threading.Lock(), itertools.count()


class _Handler(socketserver.BaseRequestHandler):
    """One connection."""

    server: _Server

    def handle(self) -> None:
        peer, opened = self.request, list[int]()
        _set_up(peer)
        try:
            with suppress(OSError, *_FOREIGN):  # the peer notices when the connection ends
                token = bytearray(TOKEN_BYTES)
                _receive(peer, memoryview(token), _nothing)
                if not hmac.compare_digest(bytes(token), self.server.token):
                    return
                while (request := _receive_message(peer, _nothing)) is not None:
                    match request["do"]:
                        case "put":
                            self._put(peer, request, opened)
                        case "chunk":
                            self._receive_chunk(peer, request)
                        case "get":
                            self._get(peer, self.server.copies, CopyKey(*request["key"]), request)
        finally:
            for number in opened:
                self.server.rooms.pop(number, None)

    def _put(self, peer: socket.socket, request: dict[str, Any], opened: list[int]) -> None:
        copies, owner, size = self.server.copies, request["owner"], request["bytes"]
        index = {file: {n: Stored(*stored) for n, stored in its.items()} for file, its in request["index"].items()}
        copies.discard(owner)  # a part of a failed copy, whose memory this part can use
        try:
            room = _Room(CopyKey(*request["key"]), owner, index, copies.room(size), size)
        except PentadError as error:
            _send_message(peer, {"error": str(error)}, _nothing)
            return
        opened.append(number := next(self.server.numbers))
        self.server.rooms[number] = room
        self._has_arrived(number, room, 0)
        _send_message(peer, {"room": number}, _nothing)

    def _receive_chunk(self, peer: socket.socket, request: dict[str, Any]) -> None:
        room, start, size = self.server.rooms[request["room"]], request["start"], request["bytes"]
        chunk, crc = room.data.data[start : start + size], bytearray(_CRC.size)
        if not 0 <= start <= start + size == start + chunk.nbytes:
            raise ValueError(f"a chunk of {size} bytes at {start}")
        _receive(peer, chunk, _nothing)
        _receive(peer, memoryview(crc), _nothing)
        if _CRC.unpack(crc) != (zlib.crc32(chunk),):
            _send_message(peer, {"error": "the bytes that arrived are not those that were sent"}, _nothing)
            return
        self._has_arrived(request["room"], room, size)
        _send_message(peer, {}, _nothing)

    def _has_arrived(self, number: int, room: _Room, size: int) -> None:
        copies = self.server.copies
        with self.server.changing:
            room.missing -= size
            if room.missing == 0 and number in self.server.rooms:
                del self.server.rooms[number]
                copies.put(room.key, room.owner, CopyPart(room.index, room.data, room.data, copies.spare.append))

    def _get(self, peer: socket.socket, copies: HostCopies, key: CopyKey, request: dict[str, Any]) -> None:
        data, start = copies.find(key, request["owner"]), request["start"]
        if data is None or not 0 <= start <= start + request["bytes"] <= data.nbytes:
            _send_message(peer, {"error": f"this process has no such bytes of rank {request['owner']}"}, _nothing)
            return
        _send_message(peer, {}, _nothing)
        _send(peer, data.data[start : start + request["bytes"]], _nothing)


def _send_message(peer: socket.socket, message: dict[str, Any], check: Check) -> None:
    text = json.dumps(message).encode()
    _send(peer, memoryview(_LENGTH.pack(len(text)) + text), check)


def _receive_message(peer: socket.socket, check: Check) -> dict[str, Any] | None:
    """None if the peer has ended the connection."""
    length = bytearray(_LENGTH.size)
    try:
        _receive(peer, memoryview(length), check)
    except _Ended:
        return None
    (size,) = _LENGTH.unpack(length)
    if size > MAX_REQUEST:
        raise ValueError(f"a request of {size} bytes")
    text = bytearray(size)
    _receive(peer, memoryview(text), check)
    message = json.loads(text)
    if not isinstance(message, dict):
        raise ValueError("a request that is no object")
    return message


def _receive_answer(peer: socket.socket, check: Check) -> dict[str, Any]:
    answer = _receive_message(peer, check)
    if answer is None:
        raise ConnectionError("connection closed by peer")
    if "error" in answer:
        raise OSError(answer["error"])
    return answer


def _send(peer: socket.socket, data: memoryview | bytes, check: Check) -> None:
    view, at, idle = memoryview(data).cast("B"), 0, 0
    while at < len(view):
        try:
            sent = peer.send(view[at : at + CHUNK_BYTES])
        except BlockingIOError:
            idle = _waited(idle, check)
            continue
        at, idle = at + sent, 0


def _receive(peer: socket.socket, into: memoryview, check: Check) -> None:
    """Fills `into`."""
    view, at, idle = into.cast("B"), 0, 0
    while at < len(view):
        try:
            count = peer.recv_into(view[at : at + CHUNK_BYTES], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            idle = _waited(idle, check)
            continue
        if not count:
            raise (ConnectionError if at else _Ended)("connection closed by peer")
        at, idle = at + count, 0


def _waited(idle: int, check: Check) -> int:
    """Counts consecutive polls in which nothing moved."""
    check()
    if idle * POLL_SECONDS > IDLE_SECONDS:
        raise ConnectionError(f"connection reset: nothing moved for {IDLE_SECONDS:g} s")
    return idle + 1
