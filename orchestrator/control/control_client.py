"""The client of a run's control service, found through control.json in the run's folder; and the last state of a run
that has ended."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc

from pentad.orchestrator.control.certificate import open_channel, require_certificate
from pentad.orchestrator.control.control_messages import ENDPOINT, MAX_MESSAGE_BYTES, METHODS, plain
from pentad.orchestrator.monitoring.evaluations import EVAL_KEYS, evaluation_state
from pentad.orchestrator.monitoring.run_state import RunView
from pentad.orchestrator.monitoring.runfolder import EVALUATIONS, JOURNAL, METRICS, PROGRAM, resolve_run, saved_config
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.records.run_lock import holder_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.regular_files import MOST_JSON, regular_file

_ENDINGS = {"end": "finished", "stop": "stopped", "failure": "failed"}
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_ADDRESS = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_TOKEN = re.compile(r"[ -~]{1,1000}")
_OTHER_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"  # part of gRPC's text about a failed handshake
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class NotLive(PentadError):
    """The run has ended, or its process is gone; `last` is its last status, read from its folder."""

    def __init__(self, sentence: str, last: dict[str, Any]) -> None:
        super().__init__(sentence)
        self.last = last


class Client(AbstractContextManager["Client"]):
    """A live run. The methods raise NotLive if it has ended, and PentadError for any other failure.

    `timeout_seconds` limits the wait for the answer; a `generation` other than 0 must be the run's current one.
    """

    def __init__(self, folder: Path, endpoint: dict[str, Any]) -> None:
        self.folder, self.address, self.token = folder, endpoint["address"], endpoint["token"]
        self._channel = open_channel(self.address, endpoint.get("certificate"), _OPTIONS)
        self._metadata = (("authorization", f"Bearer {self.token}"),)

    def status(self, timeout_seconds: float = 5.0) -> dict[str, Any]:
        """The fields of Status in control.proto."""
        return self._ask("GetStatus", timeout_seconds)

    def watch(self, timeout_seconds: float = 5.0) -> Iterator[dict[str, Any]]:
        """The status now and after each change, until the run is over; the timeout is for the first answer."""
        self.status(timeout_seconds)  # do not wait forever for a stuck process
        while True:
            try:
                for status in self._call("WatchStatus", None):
                    yield plain(status)
                if status.state in _ENDINGS.values():
                    return
                raise gone(self.folder, self.address)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # the service limits the length of a stream
                    raise self._error("WatchStatus", error, 0.0) from None

    def request(self, verb: str, timeout_seconds: float = 60.0, generation: int = 0) -> dict[str, Any]:
        """Asks the run to 'pause', 'resume', 'checkpoint', 'stop' or 'abort', and waits until it has done so.

        Returns {"run", "state", "step", "generation"}; for 'checkpoint', 'step' is the checkpoint's number of steps.
        """
        return self._ask(verb.capitalize(), timeout_seconds, generation=generation)

    def close(self) -> None:
        self._channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, name: str, seconds: float, **fields: Any) -> dict[str, Any]:
        try:
            return plain(self._call(name, seconds, **fields))
        except grpc.RpcError as error:
            raise self._error(name, error, seconds) from None

    def _call(self, name: str, seconds: float | None, **fields: Any) -> Any:
        (method,) = (method for method in METHODS if method.name == name)
        kind: Callable[..., Any] = self._channel.unary_stream if method.streams else self._channel.unary_unary
        call = kind(f"/{method.service}/{name}", method.request.SerializeToString, method.response.FromString)
        return call(method.request(**fields), timeout=seconds, metadata=self._metadata)

    def _error(self, name: str, error: Any, seconds: float) -> PentadError:
        """The error for the user after a failed call."""
        run, code = self.folder.name, error.code()
        if code in _GONE and _OTHER_CERTIFICATE in error.details():
            return self._foreign("certificate", "does not have")
        if code in _GONE:
            return gone(self.folder, self.address)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            late = "has not answered" if name == "GetStatus" else f"got the request, but {name} is not done yet"
            return PentadError(f"--timeout is {seconds:g} s, in which run {run} {late}: expected a longer one")
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return self._foreign("token", "refuses")
        return PentadError(f"run {run} refuses {name}: {error.details()}")

    def _foreign(self, what: str, verb: str) -> PentadError:
        found = f"{self.folder / ENDPOINT} has a {what} that the service at {self.address} {verb}"
        return PentadError(f"{found}: expected the file that run {self.folder.name} wrote")


def connect(run: str | Path) -> Client:
    """A client of a live run, given by its folder or its name under runs/; close it or use it in a `with`.

    Raises NotLive if the run has ended, and PentadError if there is no such run or it cannot be reached from here.
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


def gone(folder: Path, address: str) -> PentadError:
    """The error for a run that does not answer: NotLive, or another PentadError if a process still holds the run."""
    last = ended(folder)
    if holder := holder_of(folder):
        found = f"run {last['run']} does not answer at {address}, but process {holder} has it"
        return PentadError(f"{found}: expected one that runs and is not stopped")
    found = f"run {last['run']} is not running any more (nothing answers at {address})"
    return NotLive(f"{found}, its last known step is {last['step']}: expected a live one", last)


def ended(folder: Path) -> dict[str, Any]:
    """The last status of a run that is not live, read from its folder; `step` is the number of steps done."""
    view = last_view(folder)
    return {**view._asdict(), "evaluations": [each._asdict() for each in view.evaluations]}


def last_view(folder: Path) -> RunView:
    """The last view of a run that is not live, read from its folder, without ranks."""
    config = saved_config(folder)
    rows, events = read_lines(folder / METRICS, ["step", "generation"]), read_lines(folder / JOURNAL, ["event"])
    row = rows[-1] if rows else {"step": -1, "generation": 0}
    states = [event for event in events if event["event"] in ("start", *_ENDINGS)]
    state = _ENDINGS.get(states[-1]["event"], "failed") if states else "stopped"
    return RunView(
        run=config.run.name,
        folder=str(folder),
        state=state,
        step=row["step"] + 1,
        steps=config.run.steps,
        generation=max([row["generation"], *(event.get("generation", 0) for event in events)]),
        mesh=str(config.mesh.mesh),
        schedule=config.schedule.name,
        program=Program.load(folder / PROGRAM).hash if (folder / PROGRAM).is_file() else "",
        loss=row.get("loss"),
        tokens_per_second=row.get("tokens_per_second"),
        verdict=_failure(states),
        **evaluation_state(config, read_lines(folder / EVALUATIONS, EVAL_KEYS), row["step"] + 1),
    )


def _failure(states: list[dict[str, Any]]) -> str:
    if not states or states[-1]["event"] in ("end", "stop"):
        return ""
    return states[-1].get("error", "it ended without an error message: it was killed, or its machine is gone")


def _endpoint(folder: Path) -> dict[str, Any] | None:
    """The content of control.json, if there is one. Raises PentadError if it is damaged or names another machine's
    loopback address."""
    path = folder / ENDPOINT
    try:
        found = json.loads(regular_file(path, MOST_JSON).read_text(encoding="utf-8"))
        address = found["address"]
        if not (_ADDRESS.fullmatch(address) and _TOKEN.fullmatch(found["token"])):  # gRPC would print errors of its own
            raise ValueError
        if "certificate" in found:
            require_certificate(found["certificate"])
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise PentadError(f"{path} is damaged: expected address and token; remove it if the run has ended") from None
    home = found.get("host", "")
    if home and home != socket.gethostname() and address.startswith(("127.", "localhost:", "[::1]:")):
        there = f"{address} of {home}"
        raise PentadError(f"run {folder.name} listens at {there} only: expected that machine or another metrics.host")
    return found
