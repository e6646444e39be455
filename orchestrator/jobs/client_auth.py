"""Access to a Ray cluster from outside: its dashboard's URL, and its token."""

from __future__ import annotations

import json
import logging
import os
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from ray.job_submission import JobSubmissionClient

from pentad.schedules.ir.errors import PentadError

DEFAULT_URL = "http://127.0.0.1:8265"
PROBE_SECONDS = 5.0
_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # the first that holds a URL is used, as in Ray


def connect(url: str, token: str) -> JobSubmissionClient:
    """A client of Ray's job service. Raises whatever Ray's client raises."""
    for handler in logging.getLogger("ray").handlers:
        handler.setLevel(logging.WARNING)  # hides messages about uploads
    held = {name: os.environ.pop(name) for name in _ADDRESSES if name in os.environ}  # would override the URL
    try:
        return JobSubmissionClient(url, headers={"Authorization": f"Bearer {token}"} if token else None)
    finally:
        os.environ.update(held)


def dashboard_url(given: str | None) -> str:
    """The dashboard's URL: the one given, else from Ray's environment variables, else of a cluster on this machine."""
    urls = [os.environ.get(name, "") for name in _ADDRESSES]
    found = given or next((url for url in urls if url.startswith(("http://", "https://"))), DEFAULT_URL)
    url = (found if "://" in found else f"http://{found}").partition("#")[0].rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise PentadError(f"--address is '{found}': expected the URL of a Ray dashboard such as {DEFAULT_URL}")
    return url


def is_open(address: str) -> bool:
    """Whether the cluster works without a token. Raises PentadError at once if no cluster answers; Ray's client would
    retry for minutes."""
    reason = "not a Ray dashboard"
    try:
        with urlopen(f"{address}/api/version", timeout=PROBE_SECONDS) as answer:
            if "ray_version" in json.load(answer):
                return True
    except HTTPError as error:
        if error.code in (401, 403):
            return False
        reason = f"{reason}: HTTP {error.code}"
    except OSError as error:
        reason = str(getattr(error, "reason", error))
    except (ValueError, HTTPException):
        pass
    found = f"--address is '{address}', where no Ray cluster answers ({reason})"
    raise PentadError(f"{found}: expected its dashboard's URL")


def user_token() -> str:
    """This user's token, from where Ray keeps it, or ''. Raises PentadError if RAY_AUTH_TOKEN_PATH cannot be read."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return ""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named or os.path.expanduser("~/.ray/auth_token"))
    try:
        return path.read_text().strip()
    except OSError as error:
        if named:
            reason = f"which cannot be read ({error.strerror}): expected a file with the cluster's token"
            raise PentadError(f"RAY_AUTH_TOKEN_PATH is '{named}', {reason}") from None
        return ""


def refusal(address: str, answer: str) -> str:
    """The error text for a cluster whose `answer` says that the token is wrong or missing."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return f"RAY_AUTH_MODE is disabled, but the Ray cluster at {address} asks for a token: expected it unset"
    expected = "expected the cluster's token in RAY_AUTH_TOKEN, or in a file that RAY_AUTH_TOKEN_PATH names"
    fault = "refuses the token found here" if "failed" in answer else "asks for a token, and none was found here"
    return f"the Ray cluster at {address} {fault}: {expected}"
