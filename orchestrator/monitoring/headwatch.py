"""Watches the Ray head: if it is gone, the driver's calls into Ray block until Ray kills the process."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pentad.orchestrator.cluster.cluster import Cluster
from pentad.orchestrator.monitoring.event_bus import EventBus

CHECK_SECONDS = 0.5
LOCAL_SECONDS = 2.0  # nobody restarts a local head
JOINED_SECONDS = 45.0  # an existing cluster's head may be restarted; Ray itself waits 60 s
EXIT_SECONDS = 8.0


@contextmanager
def watched_head(cluster: Cluster, bus: EventBus) -> Iterator[None]:
    """Exits this process with one sentence if the head is gone for good, because then no call into Ray returns."""
    over = threading.Event()
    timeout = LOCAL_SECONDS if cluster.local else JOINED_SECONDS

    def gone() -> None:
        threading.Timer(EXIT_SECONDS, os._exit, (1,)).start()  # in case the steps below block
        sentence = (
            f"the Ray head at {cluster.address} has not answered for {timeout:g} s; "
            f"the same command resumes from the newest checkpoint"
        )
        with suppress(Exception):
            bus.record("failure", error=sentence)
            bus.set_state("failed")
            bus.display.close()
        with suppress(Exception):
            cluster.kill()
        print(f"pentad: {sentence}", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, args=(cluster.address, timeout, over, gone), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def watch(address: str, timeout: float, over: threading.Event, gone: Callable[[], None]) -> None:
    """Calls `gone` once nothing has accepted a connection at 'HOST:PORT' for `timeout` seconds, until `over` is set."""
    host, _, port = address.rpartition(":")
    silent_since = 0.0  # 0 while the head answers
    while not over.wait(CHECK_SECONDS):
        try:
            socket.create_connection((host, int(port)), 2 * CHECK_SECONDS).close()
            silent_since = 0.0
        except OSError:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() > silent_since + timeout and not over.is_set():
                gone()
                return
