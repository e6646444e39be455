"""What would shorten a step, in words that a user can act on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.diagnosis.remedies import Remedy, better_schedule, left_of_parts, place_names, remedy_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.compiler import compile_program
from pentad.schedules.diagnosis.attribution import STARVED
from pentad.schedules.diagnosis.causes import Cause
from pentad.schedules.diagnosis.replay import RECOMPUTE
from pentad.schedules.diagnosis.step_view import BETWEEN_STAGES, COPIES, HOST, PARAMETERS
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import ScheduleOptions

TWO = ("mesh.dp=2", "mesh.pp=2", "schedule.microbatches=4")
CASES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "inside layers": (("mesh.tp=4",), "inside layers", "mesh.tp=2 with more mesh.dp"),
    "context": (("mesh.cp=2", "mesh.tp=1"), "inside layers", "mesh.cp=1 with more mesh.pp"),
    "transfers": (("mesh.pp=4",), BETWEEN_STAGES, "mesh.pp=2 with more mesh.dp"),
    "NCCL": (("cluster.transport=nccl",), BETWEEN_STAGES, "cluster.transport=auto"),
    "ZeRO-3": ((*TWO, "zero.stage=3"), PARAMETERS, "zero.stage=2, if it fits"),
    "few gathered": ((*TWO, "zero.stage=3", "zero.max_gathered=2"), PARAMETERS, "zero.max_gathered=null, if it fits"),
    "ZeRO-2": ((*TWO, "zero.stage=2", "zero.reduce=microbatch"), PARAMETERS, "zero.reduce=step"),
    "reductions": ((*TWO, "zero.stage=0"), PARAMETERS, "batch.global_batch_size: fewer reductions"),
    "one replica": (("schedule.post_validation=false",), PARAMETERS, "schedule.post_validation=true"),
    "one rank": (("mesh.pp=1",), PARAMETERS, "batch.global_batch_size: fewer updates"),
    "one microbatch": (("mesh.pp=1", "schedule.microbatches=1"), HOST, "batch.global_batch_size: larger instructions"),
    "validated": (("schedule.post_validation=true",), PARAMETERS, "batch.global_batch_size: fewer updates"),
    "every replica": ((*TWO, "zero.stage=0"), "optimizer", "zero.stage=1"),
    "divided": ((*TWO, "zero.stage=1"), "optimizer", "batch.global_batch_size: fewer updates"),
    "on the host": (("memory.optimizer=host",), "optimizer", "memory.optimizer=device"),
    "recomputation": (("memory.recompute=full",), RECOMPUTE, "memory.recompute=none"),
    "offload": (("memory.max_resident_microbatches=4",), COPIES, "memory.max_resident_microbatches=null"),
    "fraction": (("memory.offload_fraction=0.5",), COPIES, "memory.offload_fraction=auto"),
    "as much as fits": (("memory.offload_fraction=auto",), COPIES, "memory.offload_fraction=0, if it fits"),
    "data": ((), "data", "data on a local disk"),
    "starved": ((), STARVED, "look at what else runs on their hosts"),
    "host": (("schedule.microbatches=8",), HOST, "schedule.microbatches=4: fewer"),
    "a GPU's host": (("cluster.device=cuda", "cluster.cuda_graphs=false"), HOST, "cluster.cuda_graphs=true"),
    "graphs": (("cluster.device=cuda", "cluster.cuda_graphs=true", "mesh.pp=2"), HOST, "schedule.microbatches="),
}


@pytest.mark.parametrize("case", CASES)
def test_a_part_of_the_step_has_a_remedy_that_the_configuration_accepts(case: str) -> None:
    words, kind, expected = CASES[case]
    config = load(None, words)
    found = remedy_of(Cause(kind, 0.25), config, make_plan(config, config.cluster.device.replace("auto", "cpu")), {})
    assert found.remedy.startswith(expected) and found.seconds == 0.25
    given = re.findall(r"\w+\.\w+=\w+", found.remedy)
    for each in given:
        assert load(None, [*words, each]) != config, "a remedy changes something"


EXPERTS = [f"model.experts.{each}" for each in ("num_experts=4", "top_k=2", "intermediate_size=64")]
REFUSED: dict[str, tuple[str, ...]] = {
    "CPU ranks": ("cluster.device=cpu",),
    "the references' kernels": ("precision.kernels=torch",),
    "offloading": ("memory.offload_fraction=0.5",),
    "document masks": ("data.document_mask=true",),
    "data-aware groups": ("data.document_mask=true", "data.balance=dynamic", "mesh.cp=2", "mesh.cp_method=ring"),
    "NCCL inside layers": ("mesh.tp=2", "cluster.transport=nccl"),
    "slots that grow": ("model.family=mixtral", *EXPERTS, "mesh.ep=2", "mesh.ep_capacity=1.5"),
}


@pytest.mark.parametrize("words", [*REFUSED.values(), ("mesh.pp=2",)], ids=[*REFUSED, "none"])
def test_graphs_are_advised_where_a_plan_takes_them_and_only_there(words: tuple[str, ...]) -> None:
    given = "cluster.device=cuda", "cluster.cuda_graphs=false", *words
    config = load(None, given)
    device, graphs = config.cluster.device, load(None, [*given, "cluster.cuda_graphs=true"])
    remedy = remedy_of(Cause(HOST, 0.25), config, make_plan(config, device), {}).remedy
    if words in REFUSED.values():
        assert remedy.startswith("schedule.microbatches=")
        with pytest.raises(PentadError, match=r"^cluster.cuda_graphs is true: expected false with "):
            make_plan(graphs, device)
    else:
        assert remedy == "cluster.cuda_graphs=true" and make_plan(graphs, device).cuda_graphs


def test_graphs_are_not_advised_to_a_run_whose_plan_has_them_or_is_not_known() -> None:
    config = load(None, ["cluster.device=cuda", "mesh.pp=2"])
    graphs = replace(make_plan(config, "cuda"), cuda_graphs=True)
    for plan in (graphs, None):
        assert remedy_of(Cause(HOST, 0.25), config, plan, {}).remedy.startswith("schedule.microbatches=")


def test_slow_hardware_and_uneven_stages_are_named_with_their_places() -> None:
    config, places = load(None, ["mesh.pp=4", "model.layers=6"]), {1: "node a, GPU 3", 2: "node b"}
    slow = remedy_of(Cause("slow rank", 1.0, (1,), 1.25), config, None, places)
    assert slow.cause == "rank 1 computes 25.0 % longer than its peers"
    assert slow.remedy == "look at node a, GPU 3, or replace it"
    assert remedy_of(Cause("slow rank", 1.0, (0,), 1.25), config, None, places).remedy.startswith("look at its GPU")
    for factor, times in ((3.0, "take 3 times as long as others"), (1e6, "take far longer as others")):
        link = remedy_of(Cause("slow link", 1.0, (2, 0), factor), config, None, places)
        assert link.cause.startswith("transfers from rank 2 (node b) to rank 0 ") and link.cause.endswith(times)
    uneven = remedy_of(Cause("uneven stages", 1.0, (3,), 1.5), config, None, places)
    assert uneven.cause.startswith("pp3 computes 50.0 % longer") and "mesh.pp (now 4)" in uneven.remedy


def test_a_schedule_with_a_smaller_bubble_is_named_and_only_if_there_is_one() -> None:
    words = ("mesh.pp=4", "schedule.microbatches=8", "memory.recompute=none")
    costs = Costs(forward=(1.0,) * 4, backward=(1.0,) * 4, weight=(1.0,) * 4)

    def better(name: str, *more: str) -> Remedy | None:
        program = compile_program(name, 4, 8, costs=costs, options=ScheduleOptions())
        return better_schedule(program, costs, load(None, [*words, f"schedule.name={name}", *more]))

    found = better("gpipe")
    assert found is not None and found.seconds > 0 and found.cause == "the bubble that gpipe has"
    best = re.match(r"schedule\.name=([\w-]+)", found.remedy)
    assert best is not None and better(best[1]) is None, "nothing is better than the best"
    assert better("gpipe", "memory.recompute=full") is None


def test_places_are_those_of_the_last_placement_and_zero_divides_the_update() -> None:
    moved = [{"rank": 0, "node": "a", "gpu": 2}, {"rank": 1, "node": "b", "gpu": -1}]
    entries = [{"event": "place", "ranks": [{"rank": 0, "node": "x"}]}, {"event": "place", "ranks": moved}]
    assert place_names([*entries, {"event": "end"}]) == {0: "node a, GPU 2", 1: "node b"}
    assert place_names([]) == {}
    assert left_of_parts(load(None, [*TWO, "zero.stage=0"])) == {"optimizer": 0.5}
    assert left_of_parts(load(None, [*TWO, "zero.stage=1"])) == {}
