"""A Ray head that answers again in time is not a fault; one that does not is reported once."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pentad.orchestrator.monitoring import headwatch

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def watch(monkeypatch):
    """Starts watching an address; returns the event set when the head is lost, the event that stops the watch, and the
    thread."""
    monkeypatch.setattr(headwatch, "CHECK_SECONDS", 0.02)
    ends = []

    def do(address: str, patience: float):
        over, lost = threading.Event(), threading.Event()
        thread = threading.Thread(target=headwatch.watch, args=(address, patience, over, lost.set))
        thread.start()
        ends.append((over, thread))
        return lost, over, thread

    yield do
    for over, thread in ends:
        over.set()
        thread.join()


def listener(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=100)


def test_a_head_that_answers_is_alive(watch):
    with listener() as head:
        lost, _, _ = watch(f"127.0.0.1:{head.getsockname()[1]}", 0.1)
        assert not lost.wait(0.5)


def test_a_silent_head_is_lost_after_the_timeout_and_no_sooner(watch):
    with listener() as head:
        port = head.getsockname()[1]
    began = time.monotonic()
    lost, _, thread = watch(f"127.0.0.1:{port}", 0.3)
    assert lost.wait(5)
    assert time.monotonic() >= began + 0.3
    thread.join(5)
    assert not thread.is_alive()


def test_a_head_that_returns_in_time_is_not_a_fault(watch):
    with listener() as head:
        port = head.getsockname()[1]
    lost, _, _ = watch(f"127.0.0.1:{port}", 2.0)
    time.sleep(0.2)
    with listener(port):
        assert not lost.wait(2.5)


def test_an_ended_run_needs_no_head(watch):
    with listener() as head:
        port = head.getsockname()[1]
    lost, over, thread = watch(f"127.0.0.1:{port}", 0.3)
    over.set()
    thread.join(5)
    assert not thread.is_alive()
    assert not lost.is_set()


def test_the_driver_of_a_lost_head_says_so_and_ends_though_nothing_answers(monkeypatch, capsys):
    """Every step of the shutdown may fail or hang: the process exits all the same."""
    monkeypatch.setattr(headwatch, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(headwatch, "LOCAL_SECONDS", 0.05)
    ended, timers, said = threading.Event(), list[Any](), dict[str, Any]()

    def end(status):
        said["status"] = status
        ended.set()

    class Bus:
        display = None  # which has no `close`

        def record(self, event, error):
            said[event] = error

        def set_state(self, state):
            said["state"] = state

    def kill():
        said["killed"] = True
        raise OSError("no answer")

    monkeypatch.setattr(headwatch.os, "_exit", end)
    monkeypatch.setattr(headwatch.threading, "Timer", lambda *call: SimpleNamespace(start=lambda: timers.append(call)))
    with listener() as head:
        port = head.getsockname()[1]
    cluster: Any = SimpleNamespace(local=True, address=f"127.0.0.1:{port}", kill=kill)
    bus: Any = Bus()
    with headwatch.watched_head(cluster, bus):
        assert ended.wait(20)
    sentence = f"the Ray head at 127.0.0.1:{port} has not answered for 0.05 s"
    assert said["failure"].startswith(sentence) and (said["state"], said["killed"], said["status"]) == (
        "failed",
        True,
        1,
    )
    assert capsys.readouterr().err.startswith(f"pentad: {sentence}")
    assert timers == [(headwatch.EXIT_SECONDS, end, (1,))], "the process ends even if one of these steps hangs"
