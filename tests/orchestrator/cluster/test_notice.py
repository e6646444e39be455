"""What announces the end of a rank or its node, seen from the rank."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pentad.orchestrator.cluster.notice import is_announced
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
