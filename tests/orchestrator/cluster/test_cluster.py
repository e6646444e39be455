"""The embedded cluster: who can reach it; two can coexist; it leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from footprint import Footprint
from paths import SUPPORT
from started_cluster import start_cluster

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster import ray_head
from pentad.orchestrator.cluster.cluster_join import check_joinable
from pentad.orchestrator.cluster.ray_head import psutil
from pentad.orchestrator.config.sections import ClusterSection
from pentad.orchestrator.planning import hardware
from pentad.schedules.ir.errors import PentadError

CPU = ClusterSection(device="cpu")
SIGTERM_BEFORE = signal.getsignal(signal.SIGTERM)  # a coverage tool may have set a handler


@pytest.fixture(scope="module")
def running() -> Iterator[clusters.Cluster]:
    with start_cluster(CPU, 4) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_local_cluster_has_a_cpu_for_each_rank(running: clusters.Cluster) -> None:
    assert running.local
    assert running.device == "cpu"
    assert ray.cluster_resources()["CPU"] == 4
    assert "GPU" not in ray.cluster_resources()


@pytest.mark.slow
def test_it_listens_on_the_loopback_interface_only(running: clusters.Cluster) -> None:
    listening = psutil.net_connections("tcp")
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    hosts = {c.laddr.ip for c in listening if c.status == psutil.CONN_LISTEN and c.pid in children}
    assert hosts <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert hosts


@pytest.mark.slow
def test_its_dashboard_requires_a_token_readable_only_by_its_owner(running: clusters.Cluster) -> None:
    address = f"{running.dashboard}/api/v0/actors"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(address, timeout=20)
    assert running.token_file is not None
    assert running.token_file.stat().st_mode & 0o777 == 0o600
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {running.token_file.read_text()}"})
    assert urllib.request.urlopen(request, timeout=20).status == 200


@pytest.mark.slow
def test_the_users_home_gets_no_token_file(running: clusters.Cluster) -> None:
    assert not (Path.home() / ".ray" / "auth_token").exists()


@pytest.mark.slow
def test_the_driver_keeps_its_sigterm_handler(running: clusters.Cluster) -> None:
    assert signal.getsignal(signal.SIGTERM) == SIGTERM_BEFORE


@pytest.fixture
def sigint_enabled() -> Iterator[None]:
    """Enables Ctrl-C, which a shell's background processes ignore by default."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_delayed_until_ray_is_joined(sigint_enabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def init(**options: object) -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(options)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(KeyboardInterrupt):
        clusters._init(address="somewhere")
    assert done


def test_a_second_ctrl_c_does_not_wait_for_ray(sigint_enabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second was held back too")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(KeyboardInterrupt):
        clusters._init(address="somewhere")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_auto_chooses_gpus_if_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = ClusterSection()
    monkeypatch.setattr(hardware, "local_gpus", lambda: 4)
    assert hardware.local_device(auto, 4) == ("cuda", "")
    device, note = hardware.local_device(auto, 8)
    assert device == "cpu"
    assert note == "8 ranks need a GPU each, but this machine has 4: training on CPUs"
    assert hardware.local_device(ClusterSection(device="cuda"), 8) == ("cuda", "")
    monkeypatch.setattr(hardware, "local_gpus", lambda: 0)
    assert hardware.local_device(auto, 4) == ("cpu", "")


@pytest.mark.parametrize(("visible", "gpus"), [(None, 4), ("2,3", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4)])
def test_cuda_visible_devices_limits_the_local_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: int
) -> None:
    monkeypatch.setattr(hardware.Path, "glob", lambda path, pattern: [Path(f"/dev/nvidia{n}") for n in range(4)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.local_gpus() == gpus


def test_a_taken_dashboard_port_is_reported_with_its_owner() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(
                PentadError, match=rf"^cluster.dashboard_port is {port}, but .*pid {os.getpid()}.* or 0 for any$"
            ),
            start_cluster(ClusterSection(dashboard_port=port), 1),
        ):
            pytest.fail("the port was taken")


def test_a_dashboard_that_does_not_start_does_not_end_the_head(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Head(ray_head.HeadNode):
        address = "127.0.0.1:7"

        def __init__(self, *_: object) -> None:
            pass

    asked = threading.Event()

    def fail(*_: object, **__: object) -> None:
        asked.set()
        raise RuntimeError("no dashboard here")

    monkeypatch.setattr(ray_head, "HeadNode", Head)
    monkeypatch.setattr(ray_head.Node, "start_api_server", fail)
    monkeypatch.setattr(ray_head, "_obey_driver", lambda folder, wants_dashboard: wants_dashboard.set())
    monkeypatch.setattr(sys, "argv", ["ray_head", "/nowhere", "{}"])
    head = threading.Thread(target=ray_head.main, daemon=True)
    head.start()
    assert asked.wait(20)
    head.join(0.2)
    assert head.is_alive()  # it lives until the driver ends
    out, err = capsys.readouterr()
    assert json.loads(out) == {"address": "127.0.0.1:7"} and "RuntimeError: no dashboard here" in err


JOIN = """
import sys
sys.path.append(sys.argv[2])
from started_cluster import start_cluster
from pentad.orchestrator.config.sections import ClusterSection
from pentad.schedules.ir.errors import PentadError
import ray
try:
    with start_cluster(ClusterSection(**eval(sys.argv[1])), 2) as joined:
        one = ray.remote(num_cpus=1)(lambda: 1)
        print(sum(ray.get([one.remote(), one.remote()])), joined.local, joined.address, joined.token_file)
except PentadError as error:
    print(error)
"""


def join(section: dict[str, str], footprint: Footprint | None = None) -> str:
    command = [sys.executable, "-c", JOIN, repr(section), str(SUPPORT)]
    environment = footprint.environment if footprint else None
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=True, env=environment)
    assert not done.stderr.strip(), done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_two_clusters_coexist_and_the_second_leaves_nothing_behind(running: clusters.Cluster) -> None:
    footprint = Footprint()
    answer = join({"device": "cpu"}, footprint)
    assert answer.startswith("2 True 127.0.0.1:")
    assert answer.split()[2] != running.address
    footprint.files.add(Path(answer.split()[3]).parent)
    footprint.assert_gone()
    assert ray.get(ray.remote(num_cpus=1)(lambda: 7).remote(), timeout=30) == 7


@pytest.mark.slow
def test_it_stores_nothing_where_the_environment_has_the_storage_of_another_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor does it wait until that head releases the storage."""
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path))
    monkeypatch.setenv("RAY_REDIS_ADDRESS", "127.0.0.1:9")
    assert join({"device": "cpu"}, Footprint()).startswith("2 True 127.0.0.1:")
    assert not any(tmp_path.iterdir())


def test_variables_of_the_job_itself_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    passed = clusters._passed_on()
    assert {"NCCL_DEBUG", "NCCL_NVLS_ENABLE", "PYTHONPATH"} <= set(passed)
    assert "SECRET" not in passed
    job = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    assert set(passed) - set(clusters._passed_on()) == {"NCCL_DEBUG", "PYTHONPATH"}


@pytest.mark.slow
def test_an_existing_cluster_is_joined_and_left_running(
    running: clusters.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert running.token_file is not None
    monkeypatch.setenv("RAY_AUTH_TOKEN", running.token_file.read_text())
    assert join({"address": running.address}) == f"2 False {running.address} None"
    assert ray.get(ray.remote(num_cpus=1)(lambda: 7).remote(), timeout=30) == 7


def test_an_address_where_no_cluster_answers_is_reported() -> None:
    answer = join({"address": "127.0.0.1:1"})
    assert answer.startswith("cluster.address is '127.0.0.1:1', where no Ray cluster answers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "mode", "message"),
    [
        ({"RAY_AUTH_TOKEN": "f" * 64}, "token", "the Ray cluster at {} refuses the token found here: expected the"),
        ({"RAY_AUTH_TOKEN": ""}, "token", "cluster.auth is 'token', but no token was found here: expected the"),
        ({"RAY_AUTH_MODE": "disabled"}, "disabled", "cluster.auth is 'disabled', but the Ray cluster at {} asks for"),
    ],
)
def test_a_wrong_token_is_reported_at_once(
    running: clusters.Cluster, variables: dict[str, str], mode: str, message: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    empty_home = {"HOME": str(tmp_path)}  # the last place where Ray looks for a token
    with (
        clusters.environment(empty_home | variables),
        pytest.raises(PentadError, match=message.format(running.address)),
    ):
        check_joinable(running.address, mode)
    assert time.monotonic() - began < 5
    check_joinable(running.address, "token")


@pytest.mark.slow
def test_a_dashboard_is_not_a_cluster_address(running: clusters.Cluster) -> None:
    address = str(running.dashboard).removeprefix("http://")
    with pytest.raises(PentadError, match=f"^cluster.address is '{address}', where no Ray cluster answers .what list"):
        check_joinable(address, "token")
