"""Plans hide messages of tensor ranks behind products exactly where the workers overlap them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_groups import DEEPSEEK, FAMILIES, MIXTRAL, SMALL
from plans import plan_of

from pentad.orchestrator.activations.allocations import piece_of
from pentad.orchestrator.planning.comm_volume import CommKind, stage_volume, waited_volume
from pentad.orchestrator.planning.cost_model import layer_messages
from pentad.orchestrator.planning.hardware import links_of, rates_of
from pentad.schedules.spec.model import Experts

GATHER, SCATTER = CommKind("tp", "all_gather"), CommKind("tp", "reduce_scatter")


@pytest.mark.parametrize("phase", ["F", "B", "full", "moe", "mlp", "core_attn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_waits_is_a_part_of_what_is_sent_and_that_of_experts(corpus, family, phase):
    plan = plan_of("gpipe", 1, 1, 1, corpus, model=FAMILIES[family], tp=2)
    given = plan.model, plan.layers[0], piece_of(plan), phase
    sent, waited = stage_volume(*given), waited_volume(*given)
    for kind, volume in waited.items():
        assert volume.operations <= sent[kind].operations and volume.bytes <= sent[kind].bytes
    assert plan.model.experts is not None or not waited


@pytest.mark.parametrize(
    ("experts", "ep", "phase", "gathers", "scatters"),
    [
        (MIXTRAL, 1, "F", 1, 1),
        (MIXTRAL, 1, "B", 2, 1),
        (MIXTRAL, 1, "moe", 1, 0),
        (replace(DEEPSEEK, first_k_dense=0), 1, "F", 0, 0),
        (replace(DEEPSEEK, first_k_dense=0), 2, "F", 0, 1),
        (replace(DEEPSEEK, first_k_dense=0), 2, "B", 0, 0),
    ],
)
def test_a_shared_expert_hides_what_experts_wait_for(
    corpus, experts: Experts, ep: int, phase: str, gathers: int, scatters: int
) -> None:
    sizes: dict[str, Any] = {"tp": 2, "ep": ep}
    plan = plan_of("gpipe", 1, 1, 1, corpus, model=replace(SMALL, experts=experts), **sizes)
    piece = piece_of(plan)
    stream = piece.full_stream(SMALL.hidden) // 2 * SMALL.layers
    waited = waited_volume(plan.model, plan.layers[0], piece, phase)
    assert [waited[kind].bytes if kind in waited else 0 for kind in (GATHER, SCATTER)] == [
        gathers * stream,
        scatters * stream,
    ]
    rates = rates_of("cuda", "NVIDIA H200")
    for each in layer_messages(plan.model, plan.layers[0], piece, rates, phase):
        kind = CommKind(each.axis, each.kind)
        beside = each.bytes - (waited[kind].bytes if kind in waited else 0)
        link = links_of(rates, plan.mesh, (each.axis,), in_layers=True).of(each.kind)
        share = rates.tp_hidden * (each.axis == "tp")
        assert each.hidden == pytest.approx(link.seconds(share * beside, 0))
        assert each.seconds == pytest.approx(link.seconds(each.bytes - share * beside, each.operations))
