"""Notices that a rank or its node is about to end, as seen from the rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from pentad.orchestrator.cluster import notice
from pentad.orchestrator.cluster.notice import Notice, is_announced
from pentad.orchestrator.config.config import load
from pentad.schedules.ir.errors import PentadError


def test_a_file_announces_the_end_of_a_node_once_it_is_there(tmp_path: Path) -> None:
    assert not is_announced(str(tmp_path / "notice"))
    (tmp_path / "notice").touch()
    assert is_announced(str(tmp_path / "notice"))


def test_a_url_announces_the_end_of_a_node_once_it_answers_with_200() -> None:
    codes = [404, 500, 200]

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(codes.pop(0))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/spot"
        assert [is_announced(url) for _ in range(3)] == [False, False, True]
        server.shutdown()
    assert not is_announced(url), "nobody answers"


def test_a_notice_is_an_absolute_path_or_a_url() -> None:
    with pytest.raises(PentadError, match=r"elastic.notice is 'spot': expected an absolute path, or a URL"):
        load(None, ["elastic.notice=spot"])
    assert load(None, ["elastic.notice=/run/notice"]).elastic.notice == "/run/notice"


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that this process sends to itself; restores its SIGTERM handler."""
    before, sent = signal.getsignal(signal.SIGTERM), list[int]()
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    yield sent
    signal.signal(signal.SIGTERM, before)


def test_the_first_sigterm_is_a_notice_and_the_second_one_the_end(
    signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[tuple[float, Callable[..., None], tuple[int, ...]]] = []
    monkeypatch.setattr(notice.threading, "Timer", lambda *call: SimpleNamespace(start=lambda: timers.append(call)))
    found = Notice()
    assert found.text == ""
    signal.raise_signal(signal.SIGTERM)
    assert found.text == "received SIGTERM" and not found.of_node and not signals
    ((seconds, end, given),) = timers
    end(*given)
    assert seconds == notice.TERM_SECONDS and signals == [signal.SIGKILL], "whatever the driver does"
    signal.raise_signal(signal.SIGTERM)
    assert signals == [signal.SIGKILL] * 2


def test_the_first_place_that_is_watched_announces_the_end_of_the_node(
    signals: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(notice, "POLL_SECONDS", 0.01)
    found = Notice()
    for where in (None, str(tmp_path / "first"), str(tmp_path / "second")):
        found.watch(where)
    (tmp_path / "second").touch()
    time.sleep(0.1)
    assert not found.of_node
    (tmp_path / "first").touch()
    until = time.monotonic() + 20
    while not found.of_node and time.monotonic() < until:
        time.sleep(0.01)
    assert found.of_node == f"{tmp_path / 'first'} announces the end of its node" and not found.text
