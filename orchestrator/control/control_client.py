"""Talks to a live run through the control service that its folder names, and tells of one that is no longer live."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from pentad.orchestrator.control.control_messages import ENDPOINT, MESSAGES, METHODS, MOST_BYTES, plain
from pentad.orchestrator.monitoring.runfolder import JOURNAL, METRICS, PROGRAM, read_lines, resolve_run, saved_config
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program

_ENDINGS = {"end": "finished", "stop": "stopped", "failure": "failed"}
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class NotLive(PentadError):
    """The run is over, or its process gone; `last` is what its folder knows, in the shape of a status."""

    def __init__(self, sentence: str, last: dict[str, Any]) -> None:
        super().__init__(sentence)
        self.last = last


class Client:
    """One live run. Its methods raise NotLive when it is over, and PentadError for what else goes wrong.

    `timeout_seconds` is the longest wait for the answer; `generation` that which the caller believes the run is in, 0:
    any.
    """

    def __init__(self, folder: Path, endpoint: dict[str, Any]) -> None:
        self.folder, self.address = folder, endpoint["address"]
        self._channel = grpc.insecure_channel(self.address, _OPTIONS)
        self._metadata = (("authorization", f"Bearer {endpoint['token']}"),)

    def status(self, timeout_seconds: float = 5.0) -> dict[str, Any]:
        """As RunView.plain has it."""
        return self._ask("GetStatus", MESSAGES["StatusRequest"](), timeout_seconds)

    def watch(self, timeout_seconds: float = 5.0) -> Iterator[dict[str, Any]]:
        """The status now and after each change, until the run is over; the timeout is for the first answer."""
        self.status(timeout_seconds)  # else a stuck process would be waited for without an end
        while True:
            try:
                for status in self._call("WatchStatus", MESSAGES["StatusRequest"](), None):
                    yield plain(status)
                if status.state in _ENDINGS.values():
                    return
                raise gone(self.folder, self.address)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # the service limits each stream
                    raise self._told("WatchStatus", error, 0.0) from None

    def pause(self, timeout_seconds: float = 60.0, generation: int = 0) -> dict[str, Any]:
        """Until the run is paused: {"run", "state", "step", "generation"}."""
        return self._ask("Pause", MESSAGES["Wish"](generation=generation), timeout_seconds)

    def resume(self, timeout_seconds: float = 60.0, generation: int = 0) -> dict[str, Any]:
        return self._ask("Resume", MESSAGES["Wish"](generation=generation), timeout_seconds)

    def checkpoint(self, timeout_seconds: float = 600.0, generation: int = 0) -> dict[str, Any]:
        """Until a checkpoint is whole: 'step' is its steps."""
        return self._ask("Checkpoint", MESSAGES["Wish"](generation=generation), timeout_seconds)

    def abort(self, timeout_seconds: float = 60.0, generation: int = 0) -> dict[str, Any]:
        return self._ask("Abort", MESSAGES["Wish"](generation=generation), timeout_seconds)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, name: str, request: Any, seconds: float) -> dict[str, Any]:
        try:
            return plain(self._call(name, request, seconds))
        except grpc.RpcError as error:
            raise self._told(name, error, seconds) from None

    def _call(self, name: str, request: Any, seconds: float | None) -> Any:
        (method,) = (method for method in METHODS if method.name == name)
        kind: Callable[..., Any] = self._channel.unary_stream if method.streams else self._channel.unary_unary
        call = kind(f"/{method.service}/{name}", method.request.SerializeToString, method.response.FromString)
        return call(request, timeout=seconds, metadata=self._metadata)

    def _told(self, name: str, error: Any, seconds: float) -> PentadError:
        """What a failed call means to the user."""
        run, code = self.folder.name, error.code()
        if code in _GONE:
            return gone(self.folder, self.address)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            late = "has not answered" if name == "GetStatus" else f"has been told, but {name} is not done yet"
            return PentadError(f"--timeout is {seconds:g} s, in which run {run} {late}: expected a longer one")
        if code is grpc.StatusCode.UNAUTHENTICATED:
            found = f"{self.folder / ENDPOINT} has a token that the service at {self.address} refuses"
            return PentadError(f"{found}: expected the file that run {run} wrote")
        return PentadError(f"run {run} refuses {name}: {error.details()}")


def connect(run: str | Path) -> Client:
    """A client of a live run, given by its folder or its name under runs/; close it, or use it in a `with`.

    Raises NotLive when it is over, and PentadError when there is no such run, or it cannot be reached from here.
    """
    try:
        folder = resolve_run(str(run))
        endpoint = _endpoint(folder)
    except OSError as error:
        raise PentadError(f"RUN is '{run}', which cannot be read ({error.strerror}): expected a run of yours") from None
    if endpoint is None:
        last = ended(folder)
        raise NotLive(f"run {last['run']} is {last['state']} at step {last['step']}: expected a live one", last)
    return Client(folder, endpoint)


def gone(folder: Path, address: str) -> NotLive:
    last = ended(folder)
    found = f"run {last['run']} is not running any more (nobody answers at {address})"
    return NotLive(f"{found}, its last known step is {last['step']}: expected a live one", last)


def ended(folder: Path) -> dict[str, Any]:
    """What the folder of a run that is not live knows, in the shape of a status; `step` is the number of steps done."""
    config = saved_config(folder)
    rows, events = read_lines(folder / METRICS, ["step", "generation"]), read_lines(folder / JOURNAL, ["event"])
    row = rows[-1] if rows else {"step": -1, "generation": 0}
    told = [event for event in events if event["event"] in ("start", *_ENDINGS)]
    state = _ENDINGS.get(told[-1]["event"], "failed") if told else "stopped"
    return {
        "run": config.run.name,
        "folder": str(folder),
        "state": state,
        "step": row["step"] + 1,
        "steps": config.run.steps,
        "generation": max([row["generation"], *(event.get("generation", 0) for event in events)]),
        "mesh": str(config.mesh.mesh),
        "schedule": config.schedule.name,
        "program": Program.load(folder / PROGRAM).hash if (folder / PROGRAM).is_file() else "",
        "loss": row.get("loss"),
        "tokens_per_second": row.get("tokens_per_second"),
        "verdict": _last_word(told),
        "ranks": [],
        "endpoints": {},
    }


def _last_word(told: list[dict[str, Any]]) -> str:
    if not told or told[-1]["event"] in ("end", "stop"):
        return ""
    return told[-1].get("error", "it left no last word: killed, or its machine is gone")


def _endpoint(folder: Path) -> dict[str, Any] | None:
    """What control.json says, if there is one. Raises PentadError when it is damaged, or of another machine only."""
    path = folder / ENDPOINT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        address, _ = found["address"], found["token"].encode("ascii")
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise PentadError(f"{path} is damaged: expected address and token: remove it if the run is over") from None
    home = found.get("host", "")
    if home and home != socket.gethostname() and address.startswith(("127.", "localhost:", "[::1]:")):
        there = f"{address} of {home}"
        raise PentadError(f"run {folder.name} listens at {there} only: expected that machine or another metrics.host")
    return found
