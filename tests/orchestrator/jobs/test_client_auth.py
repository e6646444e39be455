"""How commands reach a cluster: its dashboard's address, its responses, and the token sent to it."""

import http.server
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Pentad

from pentad.orchestrator.jobs import client_auth
from pentad.orchestrator.jobs.jobs import Jobs
from pentad.schedules.ir.errors import PentadError

VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither an address nor a token is configured, and the home directory is empty."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(client_auth, "PROBE_SECONDS", 0.3)


@pytest.fixture
def fixed_response() -> Iterator[Callable[[int, str], str]]:
    """Starts a server that gives the same response to every request, and returns its URL."""
    servers = []

    def start(status: int, body: str) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.usefixtures("no_cluster")
def test_a_missing_cluster_is_reported_at_once(pentad: Pentad, fixed_response: Callable[[int, str], str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        mute = f"http://127.0.0.1:{silent.getsockname()[1]}"
        other, empty = fixed_response(200, '"hello"'), fixed_response(404, "")
        for address, reason in {
            "http://127.0.0.1:1": "Connection refused",
            mute: "timed out",
            other: "not a Ray dashboard",
            empty: "not a Ray dashboard: HTTP 404",
        }.items():
            began = time.monotonic()
            status, out, err = pentad("jobs", "--address", address)
            assert (status, out) == (1, "")
            assert time.monotonic() - began < 5
            assert re.fullmatch(
                rf"pentad: --address is '{address}', where no Ray cluster answers \(.*{reason}\): expected .*\n", err
            )


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("address", ["ray://head:10001", "ftp://head", "http://", "http://[", "head:port"])
def test_an_address_is_a_url(pentad: Pentad, address: str) -> None:
    assert pentad("jobs", "--address", address)[2] == (
        f"pentad: --address is '{address}': expected the URL of a Ray dashboard such as http://127.0.0.1:8265\n"
    )


@pytest.mark.usefixtures("no_cluster")
def test_an_address_comes_from_the_option_then_rays_variables_then_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert client_auth.dashboard_url(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # the cluster's address, not its dashboard's
    assert client_auth.dashboard_url(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265/")
    assert client_auth.dashboard_url(None) == "http://head:8265"
    assert client_auth.dashboard_url("https://other") == "https://other"
    assert client_auth.dashboard_url("other:80") == "http://other:80"


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("status", "variables", "sentence"),
    [
        (401, {}, "asks for a token, and none was found here: expected .* RAY_AUTH_TOKEN, or .* RAY_AUTH_TOKEN_PATH"),
        (403, {"RAY_AUTH_TOKEN": "x"}, "refuses the token found here: expected .* RAY_AUTH_TOKEN, or in a file that"),
        (401, {"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE is disabled, but the Ray .* asks for a token: expected it"),
        (401, {"RAY_AUTH_TOKEN_PATH": "/nowhere"}, "RAY_AUTH_TOKEN_PATH is '/nowhere', which cannot be read"),
    ],
)
def test_a_missing_or_wrong_token_is_reported_in_one_sentence(
    pentad: Pentad,
    fixed_response: Callable[[int, str], str],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    variables: dict[str, str],
    sentence: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended, out, err = pentad("jobs", "--address", fixed_response(status, "Unauthorized"))
    assert (ended, out) == (1, "")
    assert re.fullmatch(rf"pentad: .*{sentence}.*\n", err)


@pytest.mark.usefixtures("no_cluster")
def test_a_token_is_read_where_ray_stores_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert client_auth.user_token() == ""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    assert client_auth.user_token() == "home"
    (tmp_path / "token").write_text("file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert client_auth.user_token() == "file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "variable")
    assert client_auth.user_token() == "variable"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert client_auth.user_token() == ""


@pytest.mark.usefixtures("no_cluster")
def test_losing_the_cluster_is_reported_in_one_sentence(fixed_response: Callable[[int, str], str]) -> None:
    jobs = Jobs(fixed_response(200, '{"ray_version": "2.60.0"}'))
    assert jobs.is_open
    jobs.client._address = "http://127.0.0.1:1"
    with pytest.raises(PentadError, match=rf"^the Ray cluster at {jobs.address} does not answer .*Connection refused$"):
        jobs.all()
