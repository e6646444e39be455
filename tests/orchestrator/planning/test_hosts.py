"""Links between hosts in the cost model, and exchanges inside layers on one host."""

from dataclasses import replace

import pytest

from pentad.orchestrator.activations.allocations import piece_of
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.comm_volume import stage_volume
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.hardware import NODE_GPUS, links_of, ranks_on_host, rates_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.simulate.rates import Links
from pentad.schedules.spec.mesh import LAYER_AXES, Axis, Mesh

ON_HOST, BETWEEN = Links.uniform(1e-6, 100.0), Links.uniform(1e-6, 10.0)
RATES = replace(rates_of("cuda", "NVIDIA H200"), intra_host=ON_HOST, peer=ON_HOST, inter_host=BETWEEN)


@pytest.mark.parametrize(
    ("mesh", "axes", "held"),
    [
        (Mesh(tp=8, dp=4), ("dp",), 1),
        (Mesh(tp=2, dp=8), ("dp",), 4),
        (Mesh(tp=2, pp=2, dp=8), ("dp",), 2),
        (Mesh(tp=16), ("tp",), NODE_GPUS),
        (Mesh(cp=2, ep=2, dp=4), ("dp", "cp", "ep"), NODE_GPUS),
    ],
)
def test_ranks_fill_hosts_from_the_innermost_axis(mesh: Mesh, axes: tuple[Axis, ...], held: int) -> None:
    assert ranks_on_host(mesh, axes) == held


def test_collectives_between_hosts_use_the_links_of_all_their_ranks() -> None:
    """They are no faster than links within a host. Each send uses one link."""
    for tp, bandwidth in ((1, 80.0), (2, 40.0), (8, 10.0)):
        found = links_of(RATES, Mesh(tp=tp, dp=64 // tp), ("dp",))
        assert [found.of(kind).bandwidth for kind in ("all_reduce", "send", "all_to_all")] == [bandwidth, 10.0, 10.0]
    fast = replace(RATES, inter_host=Links.uniform(1e-6, 50.0))
    assert links_of(fast, Mesh(dp=64), ("dp",)).all_gather.bandwidth == 100.0
    assert links_of(RATES, Mesh(dp=8), ("dp",), in_layers=True) == ON_HOST


def test_the_order_of_ranks_decides_which_axis_leaves_the_host() -> None:
    mesh, outermost = Mesh(tp=2, pp=4, dp=4), replace(RATES, host_order=("pp", "dp", "ep", "cp", "tp"))
    bandwidths = [
        [links_of(each, mesh, (axis,)).send.bandwidth for axis in ("pp", "dp")] for each in (RATES, outermost)
    ]
    assert bandwidths == [[100.0, 10.0], [10.0, 100.0]]


@pytest.mark.parametrize("axis", LAYER_AXES)
@pytest.mark.parametrize(("replicas", "issued"), [(1, "peer_issue"), (8, "issue")])
def test_the_host_issues_peer_copies_where_no_rank_is_on_another(axis: Axis, replicas: int, issued: str) -> None:
    experts = [f"model.experts.{key}" for key in ("num_experts=4", "top_k=2", "intermediate_size=64")]
    mesh = [f"mesh.{axis}=2", f"mesh.dp={replicas}", "mesh.pp=1", "schedule.name=1f1b", "batch.global_batch_size=16"]
    plan = make_plan(load(None, ["model.family=qwen3-moe", *experts, *mesh, "schedule.microbatches=1"]), "cuda")
    assert plan.transport_along(axis) == "peer", "plans on several hosts count exchanges as if they were NCCL's"
    idle = replace(rates_of("cuda"), issue=0.0, peer_issue=0.0, layer_issue=(0.0, 0.0, 0.0))
    found = {
        "issue": costs_of(plan, replace(idle, issue=1.0)),
        "peer_issue": costs_of(plan, replace(idle, peer_issue=1.0)),
    }
    late = found.pop(issued)
    for phase, seconds in (("F", late.forward), ("B", late.backward)):
        volumes = stage_volume(plan.model, plan.layers[0], piece_of(plan), phase).values()
        assert seconds == (sum(each.operations for each in volumes),)
    assert [*found.values()] == [costs_of(plan, idle)]
