"""The page's server: nobody sees anything without the token, names stay text, and no client holds up another."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from page_run import TOKEN, PageRun, page_run

from pentad.orchestrator.control.certificate import make_certificate
from pentad.orchestrator.page.page_server import ASSETS, PageServer

PAGES = (
    "/",
    "/state.json",
    "/experts.json",
    "/timeline.html",
    "/memory.html",
    "/rank-times.svg",
    "/main.js",
    "/nothing",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRun]:
    with page_run(tmp_path_factory.mktemp("runs")) as made:
        made.run(0, 1)
        yield made


class Answer:
    def __init__(self, run: PageRun, path: str, *, form: str | None = None, **headers: str) -> None:
        connection = http.client.HTTPConnection(urlsplit(run.served.url).netloc, timeout=10)
        with closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET" if form is None else "POST", path, body=form, headers=named)
            found = connection.getresponse()
            self.status, self.headers, self.body = found.status, found.headers, found.read().decode()

    @property
    def cookie(self) -> str:
        return self.headers["Set-Cookie"].partition(";")[0]


def test_nothing_is_shown_without_the_token(run: PageRun) -> None:
    for path in PAGES:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "pentad=x; bad"}, {"Cookie": 'a="'}):
            answer = Answer(run, path, **headers)
            assert answer.status == 401, path
            assert "trial" not in answer.body and TOKEN not in answer.body
    assert Answer(run, "/?token=wrong").status == Answer(run, "/", form="token=wrong").status == 401
    assert Answer(run, "/", form="token=" + "x" * 5000).status == 413


@pytest.mark.parametrize("way", ["query", "form"])
def test_the_token_is_given_once_and_then_a_cookie_stands_for_it(run: PageRun, way: str) -> None:
    first = Answer(run, f"/?token={TOKEN}") if way == "query" else Answer(run, "/", form=f"token={TOKEN}")
    assert (first.status, first.headers["Location"]) == (303, "/")
    assert TOKEN not in first.headers["Set-Cookie"]  # other ports of the host get the cookies, too
    assert {"HttpOnly", "SameSite=Lax"} <= set(first.headers["Set-Cookie"].split("; "))
    assert [Answer(run, path, Cookie=first.cookie).status for path in PAGES] == [200] * 7 + [404]
    assert Answer(run, "/state.json", Cookie=first.cookie + "0").status == 401


def test_a_program_gives_the_token_as_a_header(run: PageRun) -> None:
    state = json.loads(Answer(run, "/state.json", Authorization=f"Bearer {TOKEN}").body)
    assert (state["run"], state["step"], state["axes"]) == ("trial", 2, {"dp": 2, "pp": 2, "cp": 1, "tp": 1, "ep": 1})
    names = {"rank", "dp", "pp", "cp", "tp", "ep", "node", "gpu", "state", "step", "instruction", "age", "waits"}
    assert all(set(rank) == names for rank in state["ranks"])
    assert set(state["curves"]) == {"width", "step", "loss", "grad_norm", "tokens_per_second", "peak_bytes"}


def test_the_page_is_whole_and_from_one_origin(run: PageRun) -> None:
    """All files that it names are served here, scripts are files, and nothing is cached or framed elsewhere."""
    for name in ASSETS:
        answer = Answer(run, f"/{name}", Authorization=f"Bearer {TOKEN}")
        assert answer.status == 200 and "http://" not in answer.body.replace("http://www.w3.org/", ""), name
        assert (answer.headers["Cache-Control"], answer.headers["Referrer-Policy"]) == ("no-store", "no-referrer")
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'self'" in policy and "unsafe" not in policy
    assert Answer(run, "/../page_server.py", Authorization=f"Bearer {TOKEN}").status == 404


def test_a_sentence_says_what_is_not_there_yet(tmp_path: Path) -> None:
    with page_run(tmp_path) as run:
        answer = Answer(run, "/timeline.html", Authorization=f"Bearer {TOKEN}")
    assert (answer.status, answer.headers["Content-Type"]) == (404, "text/plain; charset=utf-8")
    assert answer.body.startswith("no step has been measured yet: expected one")


def test_many_readers_at_once_see_the_same(run: PageRun) -> None:
    with ThreadPoolExecutor(8) as readers:
        asked = [readers.submit(Answer, run, "/timeline.html", Authorization=f"Bearer {TOKEN}") for _ in range(8)]
        bodies = {(answer.status, answer.body) for answer in (each.result(60) for each in asked)}
    assert len(bodies) == 1 and bodies.pop()[0] == 200


def test_beyond_this_machine_it_is_encrypted(run: PageRun) -> None:
    """With the certificate of the control service, and a cookie that is only sent over TLS."""
    certificate = make_certificate()
    with closing(PageServer(run.data, "127.0.0.1", 0, TOKEN, certificate)) as served:
        assert served.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cadata=certificate.text.decode())
        trusted.check_hostname = False
        connection = http.client.HTTPSConnection(urlsplit(served.url).netloc, timeout=10, context=trusted)
        with closing(connection):
            connection.request("GET", f"/?token={TOKEN}")
            answer = connection.getresponse()
            assert answer.status == 303 and answer.headers["Set-Cookie"].endswith("; Secure")
        host, port = served.url.removeprefix("https://").rstrip("/").split(":")
        with socket.create_connection((host, int(port)), 10) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert not plain.makefile("rb").read().startswith(b"HTTP")
