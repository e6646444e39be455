"""The server of copies in memory takes what its peers send, drops what they do not, and serves on."""

from __future__ import annotations

import json
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from pentad.workers.checkpoint.safetensors_header import Stored
from pentad.workers.replication import transfer
from pentad.workers.replication.parts import CopyKey, HostCopies
from pentad.workers.replication.transfer import Check, CopyServer, open_remote, send_part

TOKEN, KEY = b"t" * 32, CopyKey(1, 4, 2)
FOREIGN: tuple[Any, ...] = (
    [],
    7,
    {},
    {"key": 3},
    {"key": [1, 2]},
    {"key": [[], 1, 1], "do": "get"},
    {"do": "get", "key": [1, 4, 2]},
)
SIZES: tuple[Any, ...] = (-1, "x", 1e20, 10**40)
INDICES: tuple[Any, ...] = (7, {"file": 7}, {"file": {"tensor": 7}}, {"file": {"tensor": []}})


@pytest.fixture
def served() -> Iterator[tuple[HostCopies, CopyServer]]:
    copies = HostCopies()
    server = CopyServer(copies, "127.0.0.1", TOKEN)
    yield copies, server
    server.close()


def say(server: CopyServer, *parts: bytes) -> bytes:
    """What the server answers until it ends the connection."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as peer:
        peer.sendall(b"".join(parts))
        with suppress(OSError):  # the server may be the first to end it
            peer.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: peer.recv(4096), b""))


def message(request: object) -> bytes:
    text = json.dumps(request).encode()
    return len(text).to_bytes(8, "little") + text


def chunk(room: int, start: int, data: bytes, crc: int | None = None) -> bytes:
    request = {"do": "chunk", "room": room, "start": start, "bytes": len(data)}
    return message(request) + data + (zlib.crc32(data) if crc is None else crc).to_bytes(4, "little")


def put(size: Any, index: Any = None) -> bytes:
    return message({"do": "put", "key": KEY, "owner": 0, "bytes": size, "index": index or {}})


def test_foreign_requests_print_nothing_and_keep_nothing(
    served: tuple[HostCopies, CopyServer], capfd: pytest.CaptureFixture[str]
) -> None:
    copies, server = served
    for request in FOREIGN:
        say(server, TOKEN, message(request))
    for size in SIZES:
        say(server, TOKEN, put(size))
    for index in INDICES:
        say(server, TOKEN, put(4, index), chunk(0, 0, b"abcd"))
    say(server, TOKEN, (1 << 60).to_bytes(8, "little"))
    say(server, TOKEN, (5000).to_bytes(8, "little"), b"[" * 5000)
    assert say(server, b"x" * 32, message({})) == b""
    assert not copies.held()
    data = np.arange(8, dtype=np.uint8)
    send_part(server.address, TOKEN, KEY, 0, {}, data, lambda: None)
    with open_remote(server.address, TOKEN, KEY, 0, lambda: None) as part:
        found = np.zeros_like(data)
        part.readinto(found)
    assert (found == data).all()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("size", [0, 1, 100, 256, 1000])
def test_a_part_arrives_with_all_of_its_bytes_over_whichever_connections(
    served: tuple[HostCopies, CopyServer], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 100)
    copies, server = served
    data, index = (
        np.random.default_rng(size).integers(0, 256, size, np.uint8),
        {"f": {"t": Stored({"dtype": "F32", "shape": []}, 3)}},
    )
    send_part(server.address, TOKEN, KEY, 1, index, data, lambda: None)
    (held,) = copies.held()
    found = copies.find(KEY, 1)
    assert (held.key, held.owner, held.bytes, held.tensors) == (KEY, 1, size, index)
    assert found is not None and (found == data).all() and not server.server.rooms


def test_a_part_is_stored_once_every_byte_that_has_arrived_is_the_one_that_was_sent(
    served: tuple[HostCopies, CopyServer],
) -> None:
    copies, server = served
    numbers = iter(range(100))
    for at in range(8):
        bad = (number := next(numbers), 4 * (at // 4), bytes(4), zlib.crc32(bytes(4)) ^ 1 << at)
        answer = say(server, TOKEN, put(8), chunk(number, 4 - 4 * (at // 4), b"abcd"), chunk(*bad))
        assert b"the bytes that arrived are not those that were sent" in answer
    for chunks in ([(0, b"abcd")], [(0, b"abcd"), (4, b"efg")], [(0, b"abcd"), (6, b"efgh")], [(-4, b"abcd")]):
        number = next(numbers)
        say(server, TOKEN, put(8), *(chunk(number, *each) for each in chunks))
    assert not copies.held() and not server.server.rooms
    number = next(numbers)
    answer = say(server, TOKEN, put(8), chunk(number, 4, b"efgh"), chunk(number, 0, b"abcd"))
    assert answer == message({"room": number}) + message({}) * 2
    found = copies.find(KEY, 0)
    assert found is not None and found.tobytes() == b"abcdefgh"
    assert say(server, TOKEN, chunk(number, 0, b"zzzz")) == b"" and found.tobytes() == b"abcdefgh", "it is in use"


def test_a_part_ends_with_any_of_its_connections(
    served: tuple[HostCopies, CopyServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory goes to no other part: a connection may still write there."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 100)
    copies, server = served
    receive_chunk, taken = transfer._Handler._receive_chunk, list[int]()

    def lose_one(handler: transfer._Handler, peer: socket.socket, request: dict[str, Any]) -> None:
        taken.append(request["start"])
        if request["start"] == 300:
            raise ConnectionError("lost")
        receive_chunk(handler, peer, request)

    monkeypatch.setattr(transfer._Handler, "_receive_chunk", lose_one)
    with pytest.raises(ConnectionError):
        send_part(server.address, TOKEN, KEY, 0, {}, np.zeros(100_000, np.uint8), lambda: None)
    assert len(taken) < 500 and not copies.held() and not copies.spare
    wait_until = time.monotonic() + 10
    while server.server.rooms and time.monotonic() < wait_until:
        time.sleep(0.01)
    assert not server.server.rooms


def test_a_holder_has_memory_for_two_parts_of_a_rank_whatever_copies_fail(
    served: tuple[HostCopies, CopyServer],
) -> None:
    copies, server = served
    for step in range(1, 7):
        send_part(server.address, TOKEN, CopyKey(1, step, 2), 0, {}, np.zeros(1000, np.uint8), lambda: None)
        if step in (1, 4):  # in other steps another rank's part never arrives
            copies.commit(CopyKey(1, step, 2))
        assert len(copies.parts) + len(copies.spare) <= 2


def test_a_driver_that_is_late_commits_no_copy_that_is_gone(served: tuple[HostCopies, CopyServer]) -> None:
    copies, server = served
    for step in (1, 2):
        send_part(server.address, TOKEN, CopyKey(1, step, 2), 0, {}, np.zeros(10, np.uint8), lambda: None)
        copies.commit(CopyKey(1, step, 2))
    copies.commit(CopyKey(1, 1, 2))
    assert [(held.key.step, held.committed) for held in copies.held()] == [(2, True)]


def test_a_part_that_is_not_there_is_an_error_that_says_so(served: tuple[HostCopies, CopyServer]) -> None:
    _, server = served
    with (
        pytest.raises(OSError, match="this process has no such bytes of rank 3"),
        open_remote(server.address, TOKEN, KEY, 3, lambda: None) as part,
    ):
        part.readinto(np.zeros(8, np.uint8))


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a process that is stopped: its system accepts connections, but nothing is read or answered."""
    monkeypatch.setattr(transfer, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(transfer, "IDLE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def send(address: str, check: Check) -> None:
    send_part(address, TOKEN, KEY, 0, {}, np.zeros(2**25, np.uint8), check)


def receive(address: str, check: Check) -> None:
    with open_remote(address, TOKEN, KEY, 0, check) as part:
        part.readinto(np.zeros(8, np.uint8))


@pytest.mark.parametrize("move", [send, receive])
def test_a_transfer_to_a_stopped_process_ends_when_nothing_moves_or_it_is_no_longer_wanted(
    silent: str, move: Callable[[str, Check], None]
) -> None:
    checks = 0

    def count() -> None:
        nonlocal checks
        checks += 1

    with pytest.raises(ConnectionError, match=r"^connection reset: nothing moved for 0\.1 s$"):
        move(silent, count)
    assert checks > 3

    def abandon() -> None:
        raise RuntimeError("the generation is over")

    with pytest.raises(RuntimeError, match="the generation is over"):
        move(silent, abandon)
