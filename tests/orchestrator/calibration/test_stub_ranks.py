"""`pentad calibrate` around ranks that measure nothing: which are started where, and how their reports are used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from calibrated_ranks import calibrate_all
from commands import Pentad
from local_actors import LocalRay

from pentad.orchestrator.calibration import nodes, ranks
from pentad.orchestrator.calibration.calibrate import calibrate, table_of
from pentad.orchestrator.calibration.nodes import measured_on_cluster
from pentad.orchestrator.calibration.ranks import run_ranks
from pentad.orchestrator.cluster.placement import Place
from pentad.orchestrator.config.config import load
from pentad.orchestrator.gpus.rate_table import RateTable
from pentad.orchestrator.planning.hardware import rates_of
from pentad.schedules.ir.errors import PentadError
from pentad.workers.health.link_rates import KINDS, PEER_KINDS

POINTS = [(2.0**12, 1e-5 + 2.0**12 / 2.5e9), (2.0**20, 1e-5 + 2.0**20 / 2.5e9)]  # 10 us and 2.5 GB/s
LINKS = dict.fromkeys(KINDS, POINTS)
PROBE = """
import json, os, sys, time
device, gpu, address, rank, hosts, calls = sys.argv[1:]
with open(os.path.join({folder!r}, rank), "x") as file:
    json.dump([device, gpu, address, hosts, calls], file)
{fault}
print("a library says something")
print(json.dumps(dict(done=1, total=2)), flush=True)
print(json.dumps(dict(rates={found!r})))
"""


def measured(gpu: str = "CPU", **links: Any) -> dict[str, Any]:
    """What rank 0 reports: the rates that plans assume, except those of links."""
    assumed = asdict(rates_of("cpu") if gpu == "CPU" else rates_of("cuda", gpu))
    names = ("products", "products_8bit", "experts", "attention", "memory", "elementwise", "update", "launch")
    found = {name: assumed[name] for name in names} | dict.fromkeys(("intra_host", "inter_host", "peer"))
    found |= {"layer": [1e-3, 2e-3, 1e-3], "pair_layer": [2e-3, 4e-3, 1e-3], "peer_layer": None}
    return json.loads(json.dumps(found | {"host_memory": POINTS, "gpu": gpu, "kernels": []} | links))


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the module that a rank's process runs."""
    monkeypatch.setattr(ranks, "PROBE", "stub_probe")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "called").mkdir()

    def write(found: object, fault: str = "") -> None:
        text = PROBE.format(folder=str(tmp_path / "called"), fault=fault, found=found)
        (tmp_path / "stub_probe.py").write_text(text)

    return write


def calls(folder: Path) -> dict[int, list[str]]:
    return {int(path.name): json.loads(path.read_text()) for path in (folder / "called").iterdir()}


def test_the_ranks_of_this_machine_measure_together_and_the_table_says_what_they_found(
    pentad: Pentad, probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    probe(measured(intra_host=LINKS))
    status, out, err = pentad("calibrate", "mesh.pp=4", "cluster.device=cpu", "--out", "table.json")
    assert (status, err) == (0, "")
    called = calls(tmp_path)
    assert set(called) == {0, 1} and called[0] == ["cpu", "0", called[1][2], "0,0", "[]"] and called[1][1] == "1"
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["CPU:", "2", "ranks", "on", "1", "host"] and lines[1] == ["measured", "assumed", "without"]
    sent = next(line for line in lines if line[:4] == ["all_to_all", "on", "a", "host"])
    assert sent[4:9] == ["10", "us", "+", "2.5", "GB/s"]
    assert "between hosts" not in out.partition("not measured")[0] and "so assumed: links between hosts" in out
    assert "cluster.rates=table.json has plans use it" in out
    table = RateTable.model_validate_json((tmp_path / "table.json").read_text())
    assert (
        table.rates.intra_host.send.bandwidth == pytest.approx(2.5e9) and table.rates.memory == rates_of("cpu").memory
    )
    assert pentad("plan", "--device", "cpu", "mesh.pp=2", "cluster.rates=table.json")[0] == 0


def test_rates_of_a_gpu_are_shown_beside_those_of_its_data_sheet(
    pentad: Pentad, probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setenv("COLUMNS", "160")
    copies = {kind: [(2.0**12, 1e-6), (2.0**20, 1e-5)] for kind in PEER_KINDS}
    narrow = [[1e9, 2e14], [1e12, 9e14]]
    probe(measured("NVIDIA H200", products_8bit=narrow, intra_host=LINKS, inter_host=LINKS, peer=copies))
    out = pentad("calibrate", "cluster.device=cpu", "--out", "table.json")[1]
    (row,) = [line for line in out.splitlines() if line.strip().startswith("products in 8 bits")]
    assert "200 T-900 T FLOP/s" in row and "send by peer copies" in out
    assert "all_to_all between hosts" in out and "not measured" not in out


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("if rank == '1': sys.exit('ValueError: odd\\n  at exit')", "calibration failed: ValueError: odd"),
        ("if rank == '1': os._exit(3)", "calibration failed: exit status 3"),
        ("time.sleep(600 if rank == '1' else 0)", "calibration failed: no end within 1 s"),
    ],
)
def test_a_rank_that_fails_or_hangs_is_one_sentence(
    probe: Any, monkeypatch: pytest.MonkeyPatch, fault: str, sentence: str
) -> None:
    monkeypatch.setattr(ranks, "LIMIT", 60.0 if "exit" in fault else 1.0)
    probe({}, fault)
    with pytest.raises(PentadError, match=f"^{sentence}$"):
        run_ranks("cpu", {1: -1}, "127.0.0.1:1", [0, 0], [])


def test_rank_0_reports(probe: Any) -> None:
    probe({"memory": 1.0})
    reported: list[tuple[int, int]] = []
    found = run_ranks("cpu", {0: -1}, "h:1", [0], [], lambda done, total: reported.append((done, total)))
    assert found == {"memory": 1.0} and reported == [(1, 2)]


def test_ranks_on_other_hosts_find_nothing_here(probe: Any, tmp_path: Path) -> None:
    probe({"memory": 1.0})
    assert run_ranks("cuda", {2: 5}, "h:1", [0, 0, 1], [("attention", (1, 2, 4, 4, 8, 8))]) is None
    assert calls(tmp_path) == {2: ["cuda", "5", "h:1", "0,0,1", '[["attention", [1, 2, 4, 4, 8, 8]]]']}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRay]:
    """Three nodes with four, three and one of eight bundles; their actors live in this process."""
    local, reserved = LocalRay(), list[object]()

    def reserve(mesh: Any, device: str, *_: Any, **__: Any) -> object:
        assert mesh.size == 8
        reserved.append(object())
        return reserved[-1]

    joined = SimpleNamespace(device="cuda", local=False)
    for name, value in {
        "ray": local,
        "launch": lambda *_: nullcontext(None),
        "join": lambda *_: nullcontext(joined),
        "reserve": reserve,
        "release": reserved.remove,
        "bundle_places": lambda placement: [Place(bundle, node) for bundle, node in enumerate("bbacaabb")],
        "strategy_of": lambda placement, bundle: bundle,
    }.items():
        monkeypatch.setattr(nodes, name, value)
    yield local
    assert not reserved, "room that was not given back"


def test_as_many_ranks_of_the_two_fullest_nodes_measure(cluster: LocalRay, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[dict[int, int], list[int]]] = []

    def run(device: str, gpus: dict[int, int], address: str, hosts: list[int], kernels: Any) -> dict[str, Any] | None:
        assert device == "cuda" and address.startswith("127.0.0.1:")
        assert [op for op, _ in kernels] == ["attention", "attention_backward_deterministic"]
        started.append((gpus, hosts))
        return measured("NVIDIA H200", intra_host=LINKS, inter_host=LINKS) if 0 in gpus else None

    monkeypatch.setattr(nodes, "run_ranks", run)
    reported: list[tuple[int, int]] = []
    config = load(None, ["cluster.address=10.0.0.1:6379", "mesh.dp=2", "mesh.pp=4"])
    table = calibrate(config, lambda: nullcontext(lambda done, total: reported.append((done, total))))
    hosts = [0, 0, 0, 1, 1, 1]
    gpus = [{0: 0, 1: 1, 2: 0}, {3: 0, 4: 0, 5: 1}]  # bundles 0, 1 and 6 are on b; 2, 4 and 5 on a
    assert started == [(each, hosts) for each in gpus] and reported == [(0, 1)]
    assert (table.ranks, table.assumed, table.gpu) == ((6, 2), (), "NVIDIA H200")
    assert table.rates.peer == table.rates.intra_host == table.rates.inter_host


def test_a_node_that_dies_is_one_sentence(cluster: LocalRay) -> None:
    cluster.faults = {0: "dead"}
    config = load(None, ["cluster.address=10.0.0.1:6379", "mesh.dp=2", "mesh.pp=4"])
    with pytest.raises(PentadError, match=r"^calibration failed on a node: The actor died unexpectedly"):
        measured_on_cluster(config, lambda done, total: None)


@pytest.mark.slow
def test_real_ranks_measure_the_links_that_they_have() -> None:
    """Two hosts of two ranks: all report the same, since the slowest rank counts."""
    found = calibrate_all([0, 0, 1, 1])
    for name in ("intra_host", "inter_host"):
        assert all(each[name] == found[0][name] for each in found)
        for kind, share in {"send": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "all_reduce": 1.0}.items():
            assert [size for size, _ in found[0][name][kind]] == [share * 2**8, share * 2**10]
            assert all(seconds > 0 for _, seconds in found[0][name][kind])
    assert all(each["pair_layer"] == found[0]["pair_layer"] for each in found)
    table = table_of(found[0], [0, 0, 1, 1])
    assert table.rates.issue > 0 and min(table.rates.layer_issue) > 0
    assert (table.assumed, table.ranks, found[0]["peer"]) == ((), (4, 2), None)
