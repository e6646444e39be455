"""Whether a run's Ray head is there: without it the driver's calls into Ray wait, until Ray ends the process."""

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

LOOK_SECONDS = 0.5
LOCAL_SECONDS = 2.0  # nobody starts a local head again
JOINED_SECONDS = 50.0  # somebody may start this one again; Ray itself waits for 60
END_SECONDS = 8.0


@contextmanager
def watched_head(cluster: Cluster, news: EventBus) -> Iterator[None]:
    """Ends this process with one sentence when the head is gone for good: no call into Ray returns then."""
    over = threading.Event()
    patience = LOCAL_SECONDS if cluster.local else JOINED_SECONDS

    def gone() -> None:
        threading.Timer(END_SECONDS, os._exit, (1,)).start()  # whatever holds this up
        sentence = (
            f"the Ray head at {cluster.address} has not answered for {patience:g} s; "
            f"the same command resumes from the newest checkpoint"
        )
        with suppress(Exception):
            news.event("failure", error=sentence)
            news.state("failed")
            news.display.__exit__()
        with suppress(Exception):
            cluster.abandon()
        print(f"pentad: {sentence}", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, args=(cluster.address, patience, over, gone), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def watch(address: str, patience: float, over: threading.Event, gone: Callable[[], None]) -> None:
    """Calls `gone` when nothing has taken a connection at 'HOST:PORT' for `patience` seconds, unless `over` is set."""
    host, _, port = address.rpartition(":")
    silent = 0.0  # since when, 0 while somebody answers: time in which nobody asked is no silence
    while not over.wait(LOOK_SECONDS):
        try:
            socket.create_connection((host, int(port)), 2 * LOOK_SECONDS).close()
            silent = 0.0
        except OSError:
            silent = silent or time.monotonic()
            if time.monotonic() > silent + patience and not over.is_set():
                gone()
                return
