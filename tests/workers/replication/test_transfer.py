"""The server of copies in memory takes what its peers send, drops what they do not, and serves on."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

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
FOREIGN += tuple({"do": "put", "key": KEY, "owner": 0, "bytes": size, "index": {}} for size in (-1, "x", 1e20, 10**40))
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


def checksum(data: bytes) -> bytes:
    """As the protocol has it, chunk by chunk."""
    chunks = [data[at : at + transfer.CHUNK_BYTES] for at in range(0, len(data), transfer.CHUNK_BYTES)]
    crcs = [zlib.crc32(chunk).to_bytes(4, "little") for chunk in chunks]
    return zlib.crc32(b"".join(crcs)).to_bytes(4, "little")


def test_foreign_requests_print_nothing_and_keep_nothing(
    served: tuple[HostCopies, CopyServer], capfd: pytest.CaptureFixture[str]
) -> None:
    copies, server = served
    for request in FOREIGN:
        say(server, TOKEN, message(request))
    for index in INDICES:
        put = {"do": "put", "key": KEY, "owner": 0, "bytes": 4, "index": index}
        say(server, TOKEN, message(put), b"abcd", checksum(b"abcd"))
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
def test_a_part_is_stored_only_if_every_byte_that_arrives_is_the_one_that_was_sent(
    served: tuple[HostCopies, CopyServer], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 100)
    copies, server = served
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    put = message({"do": "put", "key": KEY, "owner": 0, "bytes": size, "index": {}})
    swapped = np.roll(data, 100)  # chunks that are intact, in another order
    flipped = [data ^ np.eye(1, size, at, dtype=np.uint8)[0] for at in {0, size // 2, size - 1} if size]
    for other in [swapped] * (size > 100) + flipped:
        answer = say(server, TOKEN, put, other.tobytes(), checksum(data.tobytes()))
        assert b"the bytes that arrived are not those that were sent" in answer
        assert not copies.held()
    assert say(server, TOKEN, put, data.tobytes(), checksum(data.tobytes())) == message({})
    send_part(server.address, TOKEN, KEY, 1, {}, data, lambda: None)
    found = copies.find(KEY, 0), copies.find(KEY, 1)
    assert all(each is not None and (each == data).all() for each in found)


def test_a_holder_has_memory_for_two_parts_of_a_rank_whatever_copies_fail(
    served: tuple[HostCopies, CopyServer],
) -> None:
    copies, server = served
    for step in range(1, 7):
        send_part(server.address, TOKEN, CopyKey(1, step, 2), 0, {}, np.zeros(1000, np.uint8), lambda: None)
        if step in (1, 4):  # of the others another rank's part never arrives
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
    """The address of a process that is stopped: its system accepts connections, and nothing is read or answered."""
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
