"""Where checkpoints are: a local folder, or a place in a store that pyarrow opens (s3, gs, hdfs)."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded

if TYPE_CHECKING:
    from pyarrow import fs

GOOGLE = ("gs://", "gcs://")
CONNECT_SECONDS, REQUEST_SECONDS, ATTEMPTS = 5, 10, 2  # for each request


@dataclass(frozen=True)
class RemotePath:
    """A folder or file of a store, with those parts of pathlib.Path that depend only on names; `str` gives its URI.

    `store` is the beginning of the URI (s3://bucket), `path` what follows, `options` what comes after its question
    mark.
    """

    store: str
    path: str
    options: str = ""

    @classmethod
    def from_uri(cls, uri: str) -> RemotePath:
        parts = urlsplit(uri)
        return cls(f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"), parts.query)

    def __str__(self) -> str:
        return f"{self.store}/{self.path}" + (f"?{self.options}" if self.options else "")

    def __truediv__(self, name: str) -> RemotePath:
        return replace(self, path=f"{self.path}/{name}".strip("/"))

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return replace(self, path=self.path.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def absolute(self) -> RemotePath:
        return self

    @property
    def public(self) -> str:
        """The URI as shown in messages: without any credentials and options."""
        scheme, _, authority = self.store.partition("://")
        return f"{scheme}://{authority.rpartition('@')[2]}/{self.path}".rstrip("/")

    def open(self) -> tuple[fs.FileSystem, str]:
        """The file system, and its name for this place. Raises OSError, ValueError or one of pyarrow's exceptions for
        an unknown store."""
        filesystem, root = _open(self.store, self.options)
        return filesystem, f"{root.rstrip('/')}/{self.path}"


Location = Path | RemotePath


def location(text: str | Path | RemotePath) -> Location:
    """The place with this path or URI. `file://` is a local folder."""
    if isinstance(text, (Path, RemotePath)):
        return text
    if "://" not in text:
        return expanded(text)
    return Path(unquote(urlsplit(text).path)) if text.startswith("file://") else RemotePath.from_uri(text)


def has_credentials(uri: str) -> bool:
    """Whether a URI has a user or a password, which would end up in files; gs://anonymous@ counts as neither."""
    user, at, _ = urlsplit(uri).netloc.rpartition("@")
    return "://" in uri and bool(at) and not (uri.startswith(GOOGLE) and user == "anonymous")


def first_line(error: Exception) -> str:
    """What went wrong, without the names and addresses that libraries add."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return reason.splitlines()[0].partition(" Detail:")[0]


def bucket_of(store: str) -> str:
    return urlsplit(store).netloc.rpartition("@")[2]


@lru_cache
def _open(store: str, options: str) -> tuple[fs.FileSystem, str]:
    """A file system whose requests time out, and its name for the root of the store. Credentials come from the URI or,
    as pyarrow finds them, from the environment."""
    from pyarrow import fs

    if store.startswith("s3://"):
        retries = fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)
        limits = {"connect_timeout": CONNECT_SECONDS, "request_timeout": REQUEST_SECONDS, "retry_strategy": retries}
        return fs.S3FileSystem(**_s3_arguments(store, options), **limits, allow_delayed_open=True), bucket_of(store)
    if store.startswith(GOOGLE):
        limit = {"retry_limit_seconds": str(ATTEMPTS * REQUEST_SECONDS)}
        options = urlencode(limit | dict(parse_qsl(options)))
    return fs.FileSystem.from_uri(f"{store}/" + (f"?{options}" if options else ""))


atexit.register(_open.cache_clear)  # a file system that outlives the interpreter can keep it from ending


def _s3_arguments(store: str, options: str) -> dict[str, Any]:
    """The arguments of pyarrow's S3FileSystem for a URI in pyarrow's form. Raises ValueError for an unknown option."""
    from pyarrow import fs

    found: dict[str, Any] = dict(parse_qsl(options))
    known = {"region", "scheme", "endpoint_override", "force_virtual_addressing", "allow_bucket_creation"}
    if unknown := found.keys() - known:
        raise ValueError(f"unknown option {min(unknown)}: expected {', '.join(sorted(known))}")
    for key in ("force_virtual_addressing", "allow_bucket_creation"):
        if key in found:
            found[key] = found[key] in ("1", "true")
    user = urlsplit(store)
    if user.username:
        found |= {"access_key": unquote(user.username), "secret_key": unquote(user.password or "")}
    if server := s3_server(options):
        found["scheme"], found["endpoint_override"] = server
    if "region" not in found and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
        found["region"] = "us-east-1" if server else fs.resolve_s3_region(bucket_of(store))
    return found


def s3_server(options: str) -> tuple[str, str] | None:
    """Scheme and HOST:PORT of the server used instead of AWS, from the URI or the environment; None for AWS."""
    given = dict(parse_qsl(options))
    url = given.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not url:
        return None
    scheme, found, host = url.rstrip("/").rpartition("://")
    return (scheme if found else given.get("scheme", "https")), host


def unreachable(argument: str, place: RemotePath, error: Exception) -> PentadError:
    expected = "expected a folder, or a URI such as s3://bucket/folder, gs://, hdfs:// or file://"
    return PentadError(f"{argument} is '{place.public}', which cannot be reached ({first_line(error)}): {expected}")
