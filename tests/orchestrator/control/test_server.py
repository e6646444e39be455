"""The control service: who may call it and what it answers; it always answers and leaves nothing behind."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import pytest
from controls import Served, connected, first_view, once_requested, plain_view, seen, serving
from google.protobuf import descriptor_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2
from grpc_tools import protoc  # type: ignore[import-untyped]
from paths import ROOT, SUPPORT

from pentad.orchestrator.control import interceptors
from pentad.orchestrator.control.control_client import NotLive
from pentad.orchestrator.control.control_messages import METHODS, plain, status_of
from pentad.orchestrator.control.server import ControlServer
from pentad.orchestrator.monitoring.run_state import ControlRequests, EvalView, RunView
from pentad.schedules.ir.errors import PentadError

FOLDER = ROOT / "orchestrator" / "control"
MUTATIONS = ("Pause", "Resume", "Checkpoint", "Abort")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """control.proto compiled by protoc: a descriptor set and standard stubs."""
    out = tmp_path_factory.mktemp("stubs")
    outputs = [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out")]
    arguments = ["protoc", f"-I{FOLDER}", *outputs, f"--descriptor_set_out={out / 'set'}", "control.proto"]
    assert protoc.main(arguments) == 0
    return out


def path_of(name: str) -> str:
    return f"/pentad.v1.Control/{name}"


def raw(served: Served, path: str, content: bytes, token: str | None = None) -> bytes:
    """The service's response to raw bytes; the first response of a stream."""
    token = served.endpoint["token"] if token is None else token
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    return next(served._channel.unary_stream(path)(content, timeout=5, metadata=metadata))


def descriptor(path: Path) -> Any:
    return descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file[0]


def test_the_compiled_messages_are_those_of_the_proto_file(generated: Path) -> None:
    assert descriptor(FOLDER / "control.binpb") == descriptor(generated / "set")


def test_standard_stubs_drive_the_service(generated: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(generated)
    messages, stubs = import_module("control_pb2"), import_module("control_pb2_grpc")
    metadata = (("authorization", f"Bearer {served.endpoint['token']}"),)
    with grpc.insecure_channel(served.endpoint["address"]) as channel:
        stub = stubs.ControlStub(channel)
        status = stub.GetStatus(messages.StatusRequest(), metadata=metadata, timeout=5)
        assert (status.step, status.ranks[1].coordinates.pp, status.loss) == (5, 1, 2.5)
        assert next(stub.WatchStatus(messages.StatusRequest(), metadata=metadata, timeout=5)).run == "trial"
        once_requested(served, served.control.on_view, seen("paused"))
        assert stub.Pause(messages.ControlRequest(generation=2), metadata=metadata, timeout=5).state == "paused"
        once_requested(served, served.control.on_view, seen())
        assert stub.Resume(messages.ControlRequest(), metadata=metadata, timeout=5).state == "running"


EVALUATED = seen(evaluations=(EvalView("wiki", 20, 2.5), EvalView("code", 20, None)), next_evaluation=0)
UNKNOWN = seen(loss=None, tokens_per_second=None, verdict="rank 1 waits")


@pytest.mark.parametrize("view", [seen(), EVALUATED, UNKNOWN, seen()[:9]])
def test_a_status_equals_the_view(view: RunView) -> None:
    def ageless(facts: dict[str, Any]) -> dict[str, Any]:
        return {**facts, "ranks": [{**each, "heartbeat_age_seconds": 0} for each in facts["ranks"]]}

    view = RunView(*view)
    assert ageless(plain(status_of(view))) == ageless(plain_view(view))
    assert list(plain(status_of(view))) == list(plain_view(view))


def test_a_nan_loss_is_null() -> None:
    assert plain(status_of(seen(loss=float("nan"))))["loss"] is None


FORKS = """
import os, subprocess, sys
from pathlib import Path
from controls import serving
with serving(Path(sys.argv[1])) as served:
    for _ in range(120):
        served.status()
        assert subprocess.run(["true"], preexec_fn=os.getpid).returncode == 0
"""


@pytest.mark.slow
def test_a_process_forked_while_a_client_is_open_execs_its_program(tmp_path: Path) -> None:
    """This is how tests start Ray nodes: without the setting in conftest.py, 40 of 1,000 died. It runs in a process of
    its own, since a fork copies the page tables of everything that tests have imported."""
    command = [sys.executable, "-P", "-c", FORKS, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".typings"), str(SUPPORT)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_heartbeat_ages_grow_without_new_views(served: Served) -> None:
    before = served.status()["ranks"][0]["heartbeat_age_seconds"]
    time.sleep(0.05)
    assert served.status()["ranks"][0]["heartbeat_age_seconds"] >= before + 0.05


@pytest.mark.parametrize("token", ["", "wrong", "w" * 43])
def test_no_method_answers_without_the_token(served: Served, generated: Path, token: str) -> None:
    (service,) = descriptor(generated / "set").service
    assert [method.name for method in service.method] == [method.name for method in METHODS]
    for method in service.method:
        for content in (b"", b"\xff\xff"):
            with pytest.raises(grpc.RpcError) as refused:
                raw(served, path_of(method.name), content, token)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not (served.requests.paused or served.requests.aborted or served.requests.wants_checkpoint)


def test_the_endpoint_file_is_private_and_removed_when_the_run_ends(tmp_path: Path) -> None:
    control = ControlServer(tmp_path, "127.0.0.1", 0, ControlRequests())
    path = tmp_path / "control.json"
    assert path.stat().st_mode & 0o777 == 0o600
    endpoint = json.loads(path.read_text())
    assert (endpoint["address"], endpoint["pid"]) == (control.address, os.getpid())
    assert len(endpoint["token"]) >= 32
    control.close()
    control.close()
    control.on_view(seen())
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(control.address.rpartition(":")[2])))


def test_a_service_that_cannot_write_its_endpoint_does_not_run(tmp_path: Path) -> None:
    before = threading.active_count()
    (tmp_path / "control.json").mkdir()
    with pytest.raises(PentadError, match=r"control.json cannot be written"):
        ControlServer(tmp_path, "127.0.0.1", 0, ControlRequests())
    assert threading.active_count() <= before + 1  # gRPC keeps a poller thread
    assert "control" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("reusable", [False, True])
def test_a_taken_port_is_reported_in_one_sentence(
    tmp_path: Path, reusable: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reusable))
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = (
            rf"metrics.control_port is {port}, but .*pid {os.getpid()}.* has that port .*: expected a free one, or 0"
        )
        with pytest.raises(PentadError, match=sentence):
            ControlServer(tmp_path, "127.0.0.1", port, ControlRequests())
    assert capfd.readouterr().err == ""
    with closing(ControlServer(tmp_path, "127.0.0.1", port, ControlRequests())) as control:
        assert control.address == f"127.0.0.1:{port}"
        with pytest.raises(PentadError, match=f"metrics.control_port is {port}"):
            ControlServer(tmp_path / "other", "127.0.0.1", port, ControlRequests())


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.invalid", "x" * 100])
def test_a_host_that_is_not_this_machine_is_reported_in_one_sentence(tmp_path: Path, host: str) -> None:
    with pytest.raises(PentadError, match=rf"metrics.host is '{host}', where nothing can listen \(.*\): expected an a"):
        ControlServer(tmp_path, host, 0, ControlRequests())


def test_all_interfaces_are_announced_as_a_reachable_address(tmp_path: Path) -> None:
    with closing(ControlServer(tmp_path, "0.0.0.0", 0, ControlRequests())) as control:
        assert not control.address.startswith("0.0.0.0")
        with connected(tmp_path) as client:
            assert client.status()["state"] == "starting"


def test_pause_answers_when_the_run_is_paused_and_resume_when_it_runs(served: Served) -> None:
    once_requested(served, served.control.on_view, seen("paused", step=7))
    assert served.request("pause", 5) == {"run": "trial", "state": "paused", "step": 7, "generation": 2}
    assert served.requests.paused
    once_requested(served, served.control.on_view, seen(step=7))
    assert served.request("resume", 5)["state"] == "running"
    assert not served.requests.paused


def test_checkpoint_answers_once_one_is_committed(served: Served) -> None:
    once_requested(served, served.requests.checkpoint_saved, 4)  # older than the step of the run
    with pytest.raises(PentadError, match=r"--timeout is 0.5 s, in which run .*Checkpoint is not done yet"):
        served.request("checkpoint", 0.5)
    assert served.requests.wants_checkpoint
    once_requested(served, served.requests.checkpoint_saved, 6)
    assert served.request("checkpoint", 5)["step"] == 6


def test_abort_answers_when_the_run_has_ended(served: Served) -> None:
    timer = once_requested(served, served.control.close)
    assert served.request("abort", 5)["state"] == "stopped"
    timer.join()
    assert served.requests.aborted


@pytest.mark.parametrize("verb", ["pause", "checkpoint"])
def test_waiting_callers_are_answered_when_the_run_ends(served: Served, verb: str) -> None:
    once_requested(served, served.control.on_view, seen("finished", step=60))
    with pytest.raises(PentadError, match=r"run trial is over at step 60: expected a live one"):
        served.request(verb, 5)


@pytest.mark.parametrize("verb", ["pause", "resume", "checkpoint", "abort"])
def test_a_request_for_another_generation_is_refused(served: Served, verb: str) -> None:
    with pytest.raises(PentadError, match=r"generation is 1, but run trial is in 2: expected that or 0"):
        served.request(verb, 5, generation=1)
    assert not (served.requests.paused or served.requests.aborted or served.requests.wants_checkpoint)


def test_a_watcher_sees_the_newest_at_most_twice_a_second_until_the_end(served: Served) -> None:
    times, steps = [], []
    stop = threading.Event()

    def run() -> None:
        for step in range(10_000):
            served.control.on_view(seen(step=step))
            if stop.wait(0.01):
                break
        served.control.on_view(seen("finished", step=10_000))

    driver = threading.Thread(target=run)
    driver.start()
    began = time.monotonic()
    for status in served.watch():
        times.append(time.monotonic())
        steps.append(status["step"])
        if len(times) == 4:
            stop.set()
    driver.join()
    assert steps[-1] == 10_000
    assert steps == sorted(steps)
    assert all(at - began > 0.4 * number for number, at in enumerate(times)), "late on a busy machine, never early"


def test_stuck_callers_do_not_block_others(served: Served) -> None:
    """Watchers that do not read, calls that never send their request and probes that never end do not delay others."""
    token = (("authorization", f"Bearer {served.endpoint['token']}"),)
    with ExitStack() as stack:
        watchers = []
        for _ in range(interceptors.MAX_CALLERS):
            channel = stack.enter_context(grpc.insecure_channel(served.endpoint["address"]))
            watchers.append(channel.unary_stream(path_of("WatchStatus"))(b"", metadata=token))
            channel.stream_stream(path_of("Pause"))(_never(stack), metadata=token)
            served.health.Watch(health_pb2.HealthCheckRequest())
        for watcher in watchers:
            next(watcher)
        with pytest.raises(PentadError, match=r"WatchStatus has 16 callers: expected at most 16 at once"):
            next(served.watch())
        seconds = []
        for _ in range(20):
            started = time.monotonic()
            assert served.serves("")
            assert served.status()["step"] == 5
            seconds.append(time.monotonic() - started)
        assert sorted(seconds)[len(seconds) // 2] < 1.0
        watchers[0].cancel()
        assert first_view(served)["run"] == "trial"


def _never(stack: ExitStack) -> Iterator[bytes]:
    ended = threading.Event()
    stack.callback(ended.set)
    ended.wait()
    yield from ()


def test_every_call_has_a_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptors, "DEFAULT_SECONDS", 0.1)
    call = served._channel.unary_unary(path_of("Pause"))
    with pytest.raises(grpc.RpcError) as late:
        call(b"", metadata=served._metadata)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_garbage_does_not_stop_the_service(served: Served) -> None:
    draw = random.Random(0)
    host, _, port = served.control.address.rpartition(":")
    for size in (1, 10, 100, 3000):
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(draw.randbytes(size))
    with socket.create_connection((host, int(port))) as half_open:
        half_open.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        for name in ("GetStatus", "WatchStatus", *MUTATIONS):
            for _ in range(20):
                # Not the run's generation, so that random bytes that happen to parse as a ControlRequest are refused.
                content = b"\x08\x63" + draw.randbytes(draw.randrange(64)) if name in MUTATIONS else draw.randbytes(9)
                with suppress(grpc.RpcError):
                    raw(served, path_of(name), content)
        with pytest.raises(grpc.RpcError) as large:
            raw(served, path_of("GetStatus"), bytes(5 << 20))
        assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as unknown:
            raw(served, path_of("Shell"), b"")
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert served.status()["step"] == 5
        assert served.serves("")
    assert not (served.requests.paused or served.requests.aborted or served.requests.wants_checkpoint)


def test_an_invalid_message_is_reported_in_one_sentence(served: Served) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        raw(served, path_of("Pause"), b"\xff\xff")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "the request is not a pentad.v1.ControlRequest"


def test_an_internal_error_is_reported_without_its_text(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.control.on_view(seen(step="/home/user/secret"))
    with pytest.raises(grpc.RpcError) as failed:
        raw(served, path_of("GetStatus"), b"")
    assert failed.value.details() == "GetStatus failed in the run's driver (TypeError)"
    assert "Traceback" in capsys.readouterr().err  # for whoever runs the driver


SERVER = """
import sys, time
from pathlib import Path
from pentad.orchestrator.control.server import ControlServer
from pentad.orchestrator.monitoring.run_state import ControlRequests, EvalView
control = ControlServer(Path(sys.argv[1]), "127.0.0.1", 0, ControlRequests())
print("ready", flush=True)
"""


def server(folder: Path, rest: str) -> subprocess.Popen[str]:
    """A driver that serves and then runs `rest` in its main thread."""
    command = [sys.executable, "-P", "-c", SERVER + rest, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typings")}
    pipe = subprocess.PIPE
    made = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    return made


@pytest.mark.parametrize("work", ["while True: pass", "time.sleep(100)"])
def test_it_answers_while_the_driver_is_stuck(tmp_path: Path, work: str) -> None:
    with server(tmp_path, work) as driver, connected(tmp_path) as client:
        try:
            client.status()
            seconds = []
            for _ in range(30):
                started = time.monotonic()
                client.status()
                seconds.append(time.monotonic() - started)
            assert sorted(seconds)[len(seconds) // 2] < 0.1
        finally:
            driver.kill()


def test_a_driver_that_forgets_to_close_ends_quietly(tmp_path: Path) -> None:
    with server(tmp_path, "") as driver:
        _, errors = driver.communicate(timeout=20)
        assert (driver.returncode, errors) == (0, "")


def test_a_stopped_driver_times_out(tmp_path: Path) -> None:
    with server(tmp_path, "time.sleep(100)") as driver, connected(tmp_path) as client:
        try:
            os.kill(driver.pid, signal.SIGSTOP)
            os.waitpid(driver.pid, os.WUNTRACED)  # until it has stopped
            with pytest.raises(PentadError, match=r"--timeout is 0.3 s, in which run .* has not answered") as late:
                client.status(0.3)
            assert not isinstance(late.value, NotLive)
        finally:
            driver.kill()
