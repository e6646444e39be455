"""A reserved port stays free for the server it is meant for."""

from __future__ import annotations

import socket
import struct

import pytest

from pentad.orchestrator.cluster.ports import require_free, reserve

LOOPBACK = "127.0.0.1"
REUSE, SHARE = socket.SO_REUSEADDR, socket.SO_REUSEPORT


IP_LOCAL_PORT_RANGE = 51  # since Linux 6.3; Python has no name for it


def server_on_any_port_of(port: int, options: tuple[int, ...]) -> socket.socket:
    """A server that asks for any port when the system has only this one to give."""
    server = socket.socket()
    for option in options:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        server.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
    except OSError as error:
        pytest.skip(f"this system cannot narrow the ports of a socket: {error.strerror}")
    server.bind((LOOPBACK, 0))
    server.listen()
    return server


@pytest.mark.parametrize("options", [(), (REUSE,), (SHARE,), (REUSE, SHARE)], ids=["plain", "asyncio", "share", "grpc"])
def test_a_reserved_port_is_given_to_nobody_who_asks_for_any(options: tuple[int, ...]) -> None:
    with reserve("cluster.dashboard_port", LOOPBACK, 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            server_on_any_port_of(port, options)
    with server_on_any_port_of(port, options) as server:  # no longer reserved
        assert server.getsockname()[1] == port


def test_a_reserved_port_is_given_to_a_server_that_asks_for_it() -> None:
    with reserve("cluster.dashboard_port", LOOPBACK, 0) as held, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(held.getsockname())
        server.listen()
        with socket.create_connection(held.getsockname()) as client, server.accept()[0] as accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"


def test_a_port_that_was_reserved_is_free_again() -> None:
    with reserve("metrics.port", LOOPBACK, 0) as held:
        port = held.getsockname()[1]
    require_free("metrics.port", LOOPBACK, port)
