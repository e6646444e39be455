"""Requests that pentad itself sends to an S3 store are signed as AWS specifies, and end whatever the store does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pentad.workers.checkpoint import s3_requests
from pentad.workers.checkpoint.location import RemotePath
from pentad.workers.checkpoint.s3_requests import (
    Address,
    Keys,
    abort_uploads,
    address_of,
    find_keys,
    put_new,
    signature_headers,
)

# From the examples in AWS's description of Signature Version 4 for S3.
EXAMPLE = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
UPLOADS = """<?xml version="1.0"?><ListMultipartUploadsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
<Upload><Key>runs/a&amp;b</Key><UploadId>one</UploadId><Initiated>2020-01-01T00:00:00.000Z</Initiated></Upload>
<Upload><Key>runs/new</Key><UploadId>two</UploadId><Initiated>2090-01-01T00:00:00.000Z</Initiated></Upload>
</ListMultipartUploadsResult>"""


class Store(BaseHTTPRequestHandler):
    """Answers with the statuses in `answers` (0: not at all), then like a store that supports If-None-Match."""

    answers: list[int] = []  # noqa: RUF012
    objects: dict[str, bytes] = {}  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        status = self.answers.pop(0) if self.answers else 412 if self.path in self.objects else 200
        if not status:
            time.sleep(1)
            return
        if status == 200:
            self.objects[self.path] = content
        self._answer(status, "<Error><Code>AccessDenied</Code></Error>")

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self._answer(200, UPLOADS)

    def do_DELETE(self) -> None:
        self.asked.append(self.path)
        self._answer(204, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[Address]:
    for name in ("answers", "objects", "asked"):
        getattr(Store, name).clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield Address(f"http://127.0.0.1:{server.server_port}/bucket", "us-east-1")
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("query", "headers", "path", "signature"),
    [
        ("", {"range": "bytes=0-9"}, "test.txt", "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
        ("lifecycle=", {}, "", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("max-keys=2&prefix=J", {}, "", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_signatures_are_those_of_aws(query: str, headers: dict[str, str], path: str, signature: str) -> None:
    now = time.strptime("20130524T000000Z", "%Y%m%dT%H%M%SZ")
    url = f"https://examplebucket.s3.amazonaws.com/{path}"
    found = signature_headers("GET", url, query, headers, b"", "us-east-1", EXAMPLE, now)
    assert found["authorization"].endswith(f"Signature={signature}")


def test_an_object_is_written_once(address: Address) -> None:
    assert put_new(address, EXAMPLE, "runs/a b", b"first") and not put_new(address, EXAMPLE, "runs/a b", b"second")
    assert Store.objects == {"/bucket/runs/a%20b": b"first"}


def test_a_store_without_time_is_asked_again(address: Address) -> None:
    Store.answers += [409, 503]
    assert put_new(address, EXAMPLE, "a", b"first")


@pytest.mark.parametrize(("answer", "reason"), [(403, "HTTP 403 AccessDenied"), (0, "timed out")])
def test_a_store_that_refuses_or_never_answers_is_an_error_in_time(
    address: Address, monkeypatch: pytest.MonkeyPatch, answer: int, reason: str
) -> None:
    if not answer:
        monkeypatch.setattr(s3_requests, "REQUEST_SECONDS", 0.2)
    Store.answers.append(answer)
    with pytest.raises(OSError, match=reason):
        put_new(address, EXAMPLE, "a", b"first")


def test_old_uploads_are_ended_and_no_others(address: Address) -> None:
    assert abort_uploads(address, EXAMPLE, "runs/", before=time.time()) == 1
    assert Store.asked == ["/bucket/?prefix=runs%2F&uploads=", "/bucket/runs/a%26b?uploadId=one"]


@pytest.mark.parametrize(
    ("uri", "endpoint", "url"),
    [
        ("s3://bucket/x", "", "https://bucket.s3.eu-west-1.amazonaws.com"),
        ("s3://dotted.bucket/x", "", "https://s3.eu-west-1.amazonaws.com/dotted.bucket"),
        ("s3://bucket/x", "http://here:9000", "http://here:9000/bucket"),
        ("s3://bucket/x?endpoint_override=there:1&scheme=http", "http://here:9000", "http://there:1/bucket"),
        ("s3://bucket/x?endpoint_override=there&force_virtual_addressing=true", "", "https://bucket.there"),
    ],
)
def test_requests_go_where_those_of_pyarrow_go(
    monkeypatch: pytest.MonkeyPatch, uri: str, endpoint: str, url: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert address_of(RemotePath.from_uri(uri), "eu-west-1") == Address(url, "eu-west-1")


def test_keys_come_from_the_environment_or_the_account(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/credentials")
    assert find_keys() is None
    with open(f"{tmp_path}/credentials", "w") as file:
        file.write("[default]\naws_access_key_id = a\naws_secret_access_key = b%\n")
    assert find_keys() == Keys("a", "b%")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "c")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "d")
    assert find_keys() == Keys("c", "d")
