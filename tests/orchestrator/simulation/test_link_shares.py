"""How busy the operations of plans keep links, and the bands of their step times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from paths import ROOT

from pentad.orchestrator.activations.allocations import Piece
from pentad.orchestrator.api.plans import plan
from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning import cost_model
from pentad.orchestrator.planning.estimate import costs_of, rates_of_plan, simulated_seconds
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.simulation.band import plan_band
from pentad.orchestrator.simulation.link_shares import link_shares
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.simulate.rates import Links, Rates
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan

JOB = ROOT / "deploy" / "jobs" / "llama-8b.yaml"


def plan_of(*overrides: str) -> Plan:
    words = ["batch.global_batch_size=64", "cluster.rates=builtin", "cluster.gpu=NVIDIA H200", *overrides]
    return make_plan(load(JOB, words), "cuda", proved=False)


def test_tensor_ranks_use_the_links_of_their_host_and_replicas_on_others_those_between_hosts() -> None:
    planned = plan_of("mesh.tp=8", "mesh.pp=2", "mesh.dp=4", "zero.stage=1")
    shares = link_shares(planned, costs_of(planned))
    inner = shares.by_stage[Op.F][1]
    assert inner[0] > 0.2
    assert inner[1] == 0
    assert shares.by_stage[Op.REDUCE_SCATTER][0] == (0.0, 1.0)
    assert shares.transfer[0] == 0
    assert 0.5 < shares.transfer[1] < 1


def test_collectives_between_hosts_use_the_links_on_hosts_too() -> None:
    """With dp16 on two hosts, the eight ranks of a host send 8 x 40 GB/s to the other one, and pass this on within the
    host at 330 GB/s."""
    planned = plan_of("mesh.tp=1", "mesh.dp=16", "zero.stage=1", "schedule.microbatches=4")
    on_host, between = link_shares(planned, costs_of(planned)).by_stage[Op.REDUCE_SCATTER][0]
    assert (on_host, between) == pytest.approx((320 / 330, 1.0))


def test_a_share_is_the_time_of_the_bytes_over_that_of_the_instruction() -> None:
    """F of a layer with tp8 sends 7/8 of the tokens' hidden states, in bfloat16, four times: attention and the
    feed-forward network gather their input and scatter their result."""
    words = ("schedule.name=interleaved", "schedule.chunks=4", "schedule.microbatches=64")
    planned = plan_of("mesh.tp=8", "mesh.pp=4", "batch.sequence_length=8192", *words)
    assert planned.rates is not None
    link = Links.uniform(0.0, 300e9)
    planned = replace(planned, rates=replace(planned.rates, intra_host=link, peer=link))
    costs = costs_of(planned)
    shares = link_shares(planned, costs)
    stage = len(planned.layers) // 2  # with neither the embedding nor the head
    sent = 4 * len(planned.layers[stage].numbers) * 7 / 8 * 8192 * 4096 * 2
    assert shares.by_stage[Op.F][stage][0] * costs.forward[stage] == pytest.approx(sent / 300e9, rel=1e-6)


def test_one_rank_uses_no_link() -> None:
    planned = plan_of("mesh.tp=1", "model.layers=2")
    shares = link_shares(planned, costs_of(planned))
    assert shares.transfer == (0.0, 0.0)
    assert {each for its in shares.by_stage.values() for each in its} == {(0.0, 0.0)}
    found = plan_band(planned, 8)
    assert found.nominal == found.shared == pytest.approx(simulated_seconds(planned))


def test_shared_links_and_deviations_take_longer() -> None:
    planned = plan_of("mesh.tp=2", "mesh.pp=4", "mesh.dp=4", "zero.stage=1", "schedule.name=interleaved")
    band = plan_band(planned, 8)
    assert band.nominal == pytest.approx(simulated_seconds(planned))
    assert band.nominal < band.shared < band.band.low < band.band.middle < band.band.high
    assert band.mfu is not None
    assert band.mfu.low > band.mfu.high
    fast = replace(rates_of_plan(planned), inter_host=Links.uniform(0.0, 1e15), intra_host=Links.uniform(0.0, 1e15))
    unlinked = plan_band(replace(planned, rates=fast), 8)
    assert unlinked.shared == pytest.approx(unlinked.nominal, rel=1e-5)


def test_the_command_prints_the_band(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(JOB), "--device", "cuda", "mesh.tp=4", "mesh.pp=2", "cluster.rates=builtin", "--draws", "8"]
    main(words)
    assert "of steps take at most" in capsys.readouterr().out
    main([*words, "--json"])
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    band = predicted["band"]
    assert predicted["step_seconds"] <= band["shared_links_seconds"] < band["step_seconds"]["low"]
    assert band["draws"] == 8
    main([*words[:-2], "--json"])
    assert json.loads(capsys.readouterr().out)["predicted"]["band"] is None


def test_draws_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PentadError, match=r"^draws is 1: expected 0 or at least 2$"):
        plan(draws=1)
    for option, value in {"--draws": "5", "--trace": "trace.json.gz"}.items():
        assert main(["plan", str(JOB), "--search", option, value]) == 1
        assert f"{option} is {value}: expected none with --search or --gpus" in capsys.readouterr().err


@pytest.mark.parametrize("number", range(3))
def test_measured_steps_deviate_no_more_than_predicted(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs are of one pair of GPUs, which differ in the same way in all steps, and of a time when W of the
    embedding filled a dense gradient."""

    def of_all_rows(model: ModelSpec, piece: Piece, rates: Rates) -> float:
        return 12 * model.vocab * model.hidden / piece.mesh.tp / rates.memory

    monkeypatch.setattr(cost_model, "lookup_seconds", of_all_rows)
    run = json.loads((ROOT / "tests" / "bench" / "results" / "jitter-2xh200.json").read_text())["runs"][number]
    words = [*run["overrides"], "cluster.gpu=NVIDIA H200", "cluster.rates=builtin"]
    found = plan_band(make_plan(load(ROOT / Path(run["config"]), words), "cuda", proved=False), 64)
    low, middle, high = run["step_seconds"]
    measured, predicted = (high - low) / middle, (found.band.high - found.band.low) / found.band.middle
    assert 0.4 < measured / predicted < 1
    assert found.band.middle == pytest.approx(middle, rel=0.035)
