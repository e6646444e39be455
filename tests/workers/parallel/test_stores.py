"""The store at which ranks meet listens before its address is known, and only at that address."""

from __future__ import annotations

import socket

import psutil
import pytest

from pentad.workers.parallel.process_groups import join_store, start_store

pytestmark = pytest.mark.timeout(30)


def test_a_store_listens_before_its_port_is_known():
    store = start_store("127.0.0.1", 2, 5)
    with socket.create_connection(("127.0.0.1", store.port), 5):
        pass
    with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", store.port)):
        pass


def test_a_store_listens_at_one_address_only():
    store = start_store("127.0.0.1", 2, 5)
    found = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == store.port]
    assert found and set(found) == {"127.0.0.1"}


def test_clients_share_values():
    store = start_store("127.0.0.1", 2, 5)
    join_store(f"127.0.0.1:{store.port}", 2, 5).set("key", "value")
    assert store.get("key") == b"value"


def test_a_deleted_store_frees_its_port():
    store = start_store("127.0.0.1", 2, 5)
    port = store.port
    del store
    socket.create_server(("127.0.0.1", port)).close()


def test_stores_on_one_machine_have_different_ports():
    stores = [start_store("127.0.0.1", 2, 5) for _ in range(8)]
    assert len({store.port for store in stores}) == 8
