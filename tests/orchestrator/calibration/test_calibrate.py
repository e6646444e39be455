"""Tables of rates: measured, written and read, and how plans use them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from commands import Pentad

from pentad.orchestrator.activations.allocations import piece_of
from pentad.orchestrator.calibration.calibrate import table_of
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.gpus.rate_table import RateTable, place_of, write_table
from pentad.orchestrator.planning.comm_volume import stage_volume
from pentad.orchestrator.planning.estimate import costs_of, simulated_seconds
from pentad.orchestrator.planning.hardware import local_gpus, rates_for, rates_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.rates import ExpertRates, Rates
from pentad.workers.health.calibration import calibrate

GPU = "NVIDIA H200"
RATES = asdict(rates_of("cuda", GPU))
SIZES = ("model.hidden=1024", "model.ffn=4096", "model.heads=8", "batch.sequence_length=2048", f"cluster.gpu={GPU}")


def table(rates: Rates, gpu: str = GPU) -> RateTable:
    return RateTable(version=4, gpu=gpu, measured="2026-11-26", ranks=(2, 1), assumed=(), rates=rates)


def config(*overrides: str) -> RunConfig:
    return load(None, [*SIZES, *overrides])


def costs(rates: Rates, *overrides: str) -> Costs:
    return costs_of(make_plan(config(*overrides), "cuda"), rates)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_table_of_the_assumed_rates_plans_the_same(tmp_path: Path, device: str) -> None:
    name, path = "CPU" if device == "cpu" else GPU, tmp_path / "table.json"
    write_table(table(rates_of(device, GPU), name), path)
    plain, read = (make_plan(config(f"cluster.rates={each}"), device) for each in ("builtin", path))
    assert read.program.hash == plain.program.hash and simulated_seconds(read) == simulated_seconds(plain)
    assert costs_of(read) == costs_of(plain)
    assert plain.rates is not None and plain.rates.source.startswith("assumed for a")
    assert read.rates is not None and read.rates.source == f"measured 2026-11-26 ({path})"


def test_products_twice_as_fast_halve_what_is_computed() -> None:
    assumed = replace(rates_of("cuda", GPU), memory=1e30, elementwise=1e30, layer_issue=(0.0, 0.0, 0.0))
    once, twice = costs(assumed), costs(assumed.scaled("flops", 2))
    for each in ("forward", "backward", "weight"):
        assert getattr(once, each) == pytest.approx([2 * part for part in getattr(twice, each)])


def test_each_cost_of_a_link_follows_its_own_rate() -> None:
    """Transfers, reductions and gathers between layers; rates of collectives inside layers affect none of these."""
    assumed, mesh = rates_of("cuda", GPU), ("mesh.pp=2", "mesh.dp=2", "zero.stage=1", "schedule.microbatches=4")
    usual = costs(assumed, *mesh)
    for kind, cost in (("send", "transfer"), ("reduce_scatter", "reduce"), ("all_gather", "gather")):
        slow = replace(getattr(assumed.peer, kind), bandwidth=1e9)
        changed = costs(replace(assumed, peer=replace(assumed.peer, **{kind: slow})), *mesh)
        assert {name for name in vars(usual) if getattr(usual, name) != getattr(changed, name)} == {cost}
    slow_layers = replace(assumed, intra_host=replace(assumed.intra_host, all_gather=slow))
    assert costs(slow_layers, *mesh) == usual
    assert costs(slow_layers, "mesh.tp=2").forward[0] > costs(assumed, "mesh.tp=2").forward[0]


def test_a_stage_takes_at_least_as_long_as_its_host() -> None:
    """The host launches its layers and the exchanges inside them; a stage whose GPU takes longer costs as before."""
    idle = replace(rates_of("cuda", GPU), issue=0.0, peer_issue=0.0, layer_issue=(0.0, 0.0, 0.0))
    mesh = "mesh.tp=2", "mesh.pp=1", "schedule.name=1f1b"
    usual, late = costs(idle, *mesh), costs(replace(idle, layer_issue=(1.0, 2.0, 3.0)), *mesh)
    layers = config().model.layers
    assert (*late.forward, *late.backward, *late.weight) == (layers, 2 * layers, 3 * layers)
    exchanges = {phase: costs(replace(idle, peer_issue=1.0), *mesh) for phase in ("forward", "backward")}
    plan = make_plan(config(*mesh), "cuda")
    for phase, name in (("forward", "F"), ("backward", "B")):
        volumes = stage_volume(plan.model, plan.layers[0], piece_of(plan), name)
        count = sum(volume.operations for volume in volumes.values())
        assert getattr(exchanges[phase], phase) == (count,) and count > 4 * layers - 1
    assert costs(replace(idle, issue=1.0, peer_issue=1e-9, layer_issue=(1e-9,) * 3), *mesh) == usual


def test_an_exchange_takes_its_share_of_what_a_shared_layer_takes_longer() -> None:
    """The extra time of F and B of a layer, divided by its four and six exchanges."""
    layer, pair, peer = [1e-3, 2e-3, 1e-3], [1.5e-3, 3e-3, 9.0], [2.5e-3, 3e-3, 9.0]
    measured = calibrate("cpu", -1, "", 0, [0]) | {"layer": layer, "pair_layer": pair}
    for copied, longer in ((None, 1.5e-3), (peer, 2.5e-3)):
        rates = table_of(measured | {"peer_layer": copied}, [0]).rates
        assert (rates.issue, rates.peer_issue) == pytest.approx((1.5e-3 / 10, longer / 10))


def test_smaller_products_take_their_own_rate() -> None:
    assumed = rates_of("cuda", GPU)
    slow = replace(assumed, products=((1e6, assumed.flops / 10), (1e15, assumed.flops)))
    assert costs(slow).weight[0] > 1.2 * costs(assumed).weight[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", ["mesh.pp=2", "mesh.ep=2", "mesh.tp=2", "mesh.cp=2"])
@pytest.mark.parametrize("phase", ["forward", "backward", "weight"])
def test_experts_take_the_rate_of_their_rows(mesh: str, phase: str) -> None:
    """Each token visits 2 of 16 experts; experts get the visits of all ep ranks, and cp ranks have half of each
    sequence."""
    sizes = {"num_experts": 16, "top_k": 2, "intermediate_size": 1024}
    given = ["model.family=qwen3-moe", *(f"model.experts.{key}={size}" for key, size in sizes.items())]
    given += ["mesh.pp=1", mesh, "batch.global_batch_size=16", "schedule.microbatches=4", "schedule.name=1f1b"]
    plan = make_plan(config(*given), "cuda")
    assert plan.batch.micro_batch_size == (2 if mesh == "mesh.ep=2" else 4)
    rows = plan.batch.micro_batch_size * 2048 * plan.mesh.ep // plan.mesh.cp * 2 / 16
    idle = replace(rates_of("cuda", GPU), issue=0.0, peer_issue=0.0, layer_issue=(0.0, 0.0, 0.0))
    uniform = ExpertRates.uniform(3e14, 3e14, 3e14)
    curve = (rows / 2, 1e14), (rows, 2e14), (rows * 2, 8e14)
    slower = costs_of(plan, replace(idle, experts=(replace(uniform, **{phase: curve}),)))
    expected = costs_of(plan, replace(idle, experts=(replace(uniform, **{phase: ((1.0, 2e14),)}),)))
    assert slower == expected != costs_of(plan, replace(idle, experts=(uniform,)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "NVIDIA B200"}, "it is of NVIDIA B200"),
        ({"version": 3}, "version: Input should be 4"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"rates": {}}, "rates.products: Field required"),
        ({"rates": RATES | {"products": []}}, "rates.products is empty"),
        ({"rates": RATES | {"memory": -1.0}}, "rates.memory is -1.0"),
        ({"rates": RATES | {"memory": 0.0}}, "rates.memory is 0.0"),
        ({"rates": RATES | {"update": float("nan")}}, "rates.update"),
    ],
)
def test_other_tables_are_refused_in_a_sentence(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table(rates_of("cuda", GPU)).model_dump(mode="json") | changes))
    assert reason in refusal(path)


def test_what_is_no_table_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    assert "No such file or directory" in refusal(path)
    path.write_bytes(b"\xff\xfe")
    assert "no text" in refusal(path)
    path.write_text("{")
    assert "the file: Invalid JSON" in refusal(path)


def refusal(path: Path) -> str:
    """Why a table is refused: the part of the error in parentheses and what follows."""
    with pytest.raises(PentadError) as error:
        rates_for(config(f"cluster.rates={path}").cluster, "cuda")
    expected = f"cluster.rates is {path}: expected a table that `pentad calibrate` wrote for {GPU} ("
    assert str(error.value).startswith(expected) and "\n" not in str(error.value)
    return str(error.value)[len(expected) :]


def test_auto_takes_the_table_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENTAD_CACHE", str(tmp_path))
    section = config().cluster
    assert rates_for(section, "cuda") == rates_of("cuda", GPU)
    write_table(table(rates_of("cuda", GPU)), place_of(GPU))
    assert rates_for(section, "cuda").source.startswith("measured")
    assert rates_for(section, "cpu") == rates_of("cpu")
    place_of(GPU).write_text("")
    with pytest.raises(PentadError, match=r"^cluster.rates is auto, which is .*: expected a table"):
        rates_for(section, "cuda")


def test_one_rank_measures_all_but_links(capsys: pytest.CaptureFixture[str]) -> None:
    found = table_of(calibrate("cpu", -1, "", 0, [0]), [0])
    assert found.assumed == ("intra_host", "inter_host", "peer", "issue") and found.rates.issue == 0
    assert min(found.rates.layer_issue) > 0
    (experts,) = found.rates.experts
    assert all([rows for rows, _ in curve] == [16, 32] for curve in vars(experts).values())
    assert found.rates.intra_host == rates_of("cpu").intra_host
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["done"] for each in steps] == list(range(1, steps[-1]["total"] + 1))
    assert RateTable.model_validate_json(found.model_dump_json()) == found


def test_what_cannot_be_measured_or_written_is_said_before(pentad: Pentad, tmp_path: Path) -> None:
    status, _, err = pentad("calibrate", "--out", str(tmp_path), "cluster.device=cpu")
    assert (status, err.count("\n")) == (1, 1) and f"{tmp_path} is a folder: expected a file" in err
    file = tmp_path / "file"
    file.touch()
    status, _, err = pentad("calibrate", "--out", str(file / "table.json"), "cluster.device=cpu")
    assert status == 1 and f"{file / 'table.json'} cannot be written" in err
    if not local_gpus():
        status, _, err = pentad("calibrate", "--out", str(tmp_path / "out"), "cluster.device=cuda")
        assert status == 1 and "cluster.device is cuda: expected a GPU on this machine" in err


@pytest.mark.slow
def test_two_ranks_are_calibrated_and_planned_with(
    pentad: Pentad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENTAD_CACHE", str(tmp_path))
    status, out, _ = pentad("calibrate", "mesh.pp=2", "cluster.device=cpu", "--json")
    facts = json.loads(out)
    assert (status, facts["ranks"], facts["assumed"]) == (0, [2, 1], ["inter_host"])
    assert facts["path"] == str(place_of("CPU")) and facts["seconds"] < 180
    assert min(facts["rates"]["layer_issue"]) > 0 and facts["rates"]["issue"] > 0
    assert facts["rates"]["peer"] == facts["rates"]["intra_host"] != facts["rates"]["inter_host"]
    assert facts["rates"]["intra_host"]["send"] != vars(rates_of("cpu").intra_host.send)
    status, out, _ = pentad("plan", "--device", "cpu", "mesh.pp=2")
    assert status == 0 and f"from rates measured {facts['measured']} ({place_of('CPU')})" in out.replace("\n ", " ")
