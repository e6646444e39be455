"""Whether something can listen at an address, and why not, in one sentence."""

from __future__ import annotations

import errno
import socket

from pentad.schedules.ir.errors import PentadError


def refuse_taken(key: str, host: str, port: int) -> None:
    """Raises PentadError where nothing can listen; port 0 is always free."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise PentadError(why_not(key, host, port, error)) from None


def why_not(key: str, host: str, port: int, error: OSError | UnicodeError) -> str:
    """What a config of metrics.host `host` and `key` `port` does wrong, when listening there raised `error`."""
    number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, "no name of a host")
    if number == errno.EADDRINUSE:
        from pentad.orchestrator.cluster.cluster import _holder  # imports ray

        return f"{key} is {port}, but {_holder(port)} has that port ({reason}); expected a free one, or 0 for any"
    if number == errno.EACCES:
        return f"{key} is {port}, which needs more rights than yours: expected one from 1024 on, or 0 for any"
    return f"metrics.host is {host!r}, where nothing can listen ({reason}): expected an address of this machine"
