"""Checks and reserves ports of this machine, and names the process that has a taken one."""

from __future__ import annotations

import errno
import socket

from pentad.schedules.ir.errors import PentadError


def require_free(key: str, host: str, port: int) -> None:
    """Raises PentadError if nothing can listen at the port; 0 means any."""
    reserve(key, host, port).close()


def reserve(key: str, host: str, port: int) -> socket.socket:
    """A socket bound to the port, or to a free one for 0. Until it is closed, nobody who asks for any port gets this
    one, but a server that asks for it by number (with SO_REUSEADDR) does, because nothing listens there yet.

    Raises PentadError if nothing can listen there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        held = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise PentadError(listen_error(key, host, port, error)) from None
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        held.bind(address)
    except OSError as error:
        held.close()
        raise PentadError(listen_error(key, host, port, error)) from None
    return held


def listen_error(key: str, host: str, port: int, error: OSError | UnicodeError) -> str:
    """The sentence for an `error` raised by listening at metrics.host `host` and the port that `key` configures."""
    number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, "not a host name")
    if number == errno.EADDRINUSE:
        return f"{key} is {port}, but {port_owner(port)} has that port ({reason}): expected a free one, or 0 for any"
    if number == errno.EACCES:
        return f"{key} is {port}, which needs privileges: expected a port from 1024 on, or 0 for any"
    return f"metrics.host is {host!r}, where nothing can listen ({reason}): expected an address of this machine"


def port_owner(port: int) -> str:
    """The process that listens on a port, as far as this user may see."""
    from pentad.orchestrator.cluster.ray_head import psutil  # imports ray

    try:
        pids = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == psutil.CONN_LISTEN}
        names = [f"{psutil.Process(pid).name()} (pid {pid})" for pid in pids if pid]
    except psutil.Error:
        names = []
    return ", ".join(names) or "another program, perhaps another Ray dashboard,"
