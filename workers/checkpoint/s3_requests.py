"""The requests to an S3 store that pyarrow cannot send: a PUT that replaces nothing, and aborts of unfinished uploads.

Signed with AWS Signature Version 4.
"""

from __future__ import annotations

import configparser
import hashlib
import hmac
import os
import re
import time
from collections.abc import Mapping
from datetime import datetime
from html import unescape
from http.client import HTTPException
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qsl, quote, urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from pentad.workers.checkpoint.location import REQUEST_SECONDS, RemotePath, bucket_of, s3_server

ATTEMPTS = 3  # for a request that the store is too busy for
BUSY = (409, 429, 500, 502, 503, 504)
_UPLOAD, _FIELD = re.compile("<Upload>(.*?)</Upload>", re.DOTALL), re.compile("<(Key|UploadId|Initiated)>([^<]*)</")
_OPENER = build_opener(ProxyHandler({}))  # pyarrow uses no proxy, either


class Keys(NamedTuple):
    access: str
    secret: str
    token: str = ""


class Answer(NamedTuple):
    status: int
    body: bytes


class Address(NamedTuple):
    """The address of a bucket: its URL, and the region that signatures name."""

    url: str
    region: str


def find_keys() -> Keys | None:
    """Keys from the environment or the AWS credentials file; None if only pyarrow can obtain them."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        return Keys(*(os.environ.get(name, "") for name in names))
    profiles = configparser.RawConfigParser()
    try:
        profiles.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials"))
        found = profiles[os.environ.get("AWS_PROFILE", "default")]
        return Keys(found["aws_access_key_id"], found["aws_secret_access_key"], found.get("aws_session_token", ""))
    except (configparser.Error, KeyError, OSError):
        return None


def address_of(place: RemotePath, region: str) -> Address:
    """Where pyarrow, too, sends requests for the bucket; `region` is that of its file system."""
    options, bucket, server = dict(parse_qsl(place.options)), bucket_of(place.store), s3_server(place.options)
    scheme, host = server or (options.get("scheme", "https"), f"s3.{region}.amazonaws.com")
    in_host = options.get("force_virtual_addressing") in ("1", "true") or (server is None and "." not in bucket)
    return Address(f"{scheme}://{bucket}.{host}" if in_host else f"{scheme}://{host}/{bucket}", region)


def put_new(address: Address, keys: Keys, key: str, content: bytes) -> bool:
    """Writes an object unless one with this key exists; returns whether it did. Raises OSError.

    A store that ignores If-None-Match always writes it.
    """
    answer = _send(address, keys, "PUT", key, content=content, headers={"if-none-match": "*"})
    if answer.status == 412:
        return False
    _require(answer, 200)
    return True


def abort_uploads(address: Address, keys: Keys, prefix: str, before: float) -> int:
    """Aborts multipart uploads of keys with this prefix that began before the Unix second `before`, at most 1000;
    returns how many. Raises OSError."""
    answer = _send(address, keys, "GET", query={"uploads": "", "prefix": prefix})
    _require(answer, 200)
    uploads = (dict(_FIELD.findall(upload)) for upload in _UPLOAD.findall(answer.body.decode(errors="replace")))
    old = [its for its in uploads if datetime.fromisoformat(its["Initiated"]).timestamp() < before]
    for its in old:
        query = {"uploadId": unescape(its["UploadId"])}
        _require(_send(address, keys, "DELETE", unescape(its["Key"]), query=query), 204, 404)
    return len(old)


def _send(
    address: Address,
    keys: Keys,
    method: str,
    key: str = "",
    *,
    query: Mapping[str, str] = {},
    content: bytes = b"",
    headers: Mapping[str, str] = {},
) -> Answer:
    url = f"{address.url}/{quote(key)}"
    text = urlencode(sorted(query.items()), quote_via=quote)
    for attempt in range(ATTEMPTS):
        signed = signature_headers(method, url, text, headers, content, address.region, keys, time.gmtime())
        request = Request(url + (f"?{text}" if text else ""), content or None, dict(signed), method=method)
        try:
            with _OPENER.open(request, timeout=REQUEST_SECONDS) as response:
                return Answer(response.status, response.read())
        except HTTPError as error:
            if error.code not in BUSY or attempt == ATTEMPTS - 1:
                return Answer(error.code, error.read())
            time.sleep(0.2 * 2**attempt)
        except (URLError, HTTPException) as error:  # no answer, or not an HTTP answer
            raise OSError(str(getattr(error, "reason", error)) or type(error).__name__) from None
    raise AssertionError("the last attempt returns or raises")


def signature_headers(
    method: str,
    url: str,
    query: str,
    headers: Mapping[str, str],
    content: bytes,
    region: str,
    keys: Keys,
    now: time.struct_time,
) -> dict[str, str]:
    """The headers of a request, signed. Names in `headers` are in lower case, `query` is sorted and quoted."""
    parts, moment, digest = urlsplit(url), time.strftime("%Y%m%dT%H%M%SZ", now), hashlib.sha256(content).hexdigest()
    found = {**headers, "host": parts.netloc, "x-amz-content-sha256": digest, "x-amz-date": moment}
    if keys.token:
        found["x-amz-security-token"] = keys.token
    lines, names = "".join(f"{name}:{found[name]}\n" for name in sorted(found)), ";".join(sorted(found))
    canonical = "\n".join((method, parts.path or "/", query, lines, names, digest))
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{keys.secret}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    fields = f"Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**found, "authorization": f"AWS4-HMAC-SHA256 {fields}"}


def _require(answer: Answer, *statuses: int) -> None:
    if answer.status not in statuses:
        code = re.search(rb"<Code>([^<]{1,100})</Code>", answer.body)
        raise OSError(f"HTTP {answer.status}" + (f" {code[1].decode(errors='replace')}" if code else ""))
