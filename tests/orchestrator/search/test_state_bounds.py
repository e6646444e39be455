"""If the state fits on no mesh, the search ends at once and says what each mesh needs at least, which is nearly all
that it needs."""

from __future__ import annotations

from typing import Any

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import memory
from pentad.orchestrator.planning.fit import DeviceMemory
from pentad.orchestrator.search.layout import Work
from pentad.orchestrator.search.memory_bounds import least_in_any_order, state_bytes
from pentad.orchestrator.search.result import plan_setting
from pentad.orchestrator.search.search import search
from pentad.orchestrator.search.space import Order, Setting
from pentad.schedules.spec.mesh import Mesh

WORDS = ("batch.global_batch_size=64", "batch.sequence_length=4096", "cluster.device=cuda", "cluster.gpu=NVIDIA H200")


def test_no_order_is_made_where_no_mesh_holds_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> Any:
        raise AssertionError("an order was made")

    sizes = ["layers=9", "hidden=7168", "heads=128", "kv_heads=128", "ffn=18432", "vocab=129280", "family=deepseek-v3"]
    sizes += [f"mla.{each}" for each in ("kv_lora_rank=512", "qk_nope_head_dim=128", "qk_rope_head_dim=64")]
    sizes += ["mla.v_head_dim=128", "experts.num_experts=256", "experts.top_k=8", "experts.intermediate_size=2048"]
    sizes += ["experts.first_k_dense=1"]
    config = load(None, [*(f"model.{each}" for each in sizes), *WORDS])
    monkeypatch.setattr("pentad.orchestrator.search.search.Timed", made)
    found = search(config, 8, DeviceMemory(100 * 2**30, "of a GPU that holds the first and the last stage"))
    assert not found.choices
    for setting in (
        Setting(Mesh(dp=8), 8, Order("1f1b"), zero=3, recompute="full"),
        Setting(Mesh(pp=8), 64, Order("zb-h1"), recompute="full"),
        Setting(Mesh(ep=8), 8, Order("1f1b"), zero=3, offload=1.0),
    ):
        least = found.refusals[setting.mesh].least_bytes
        assert found.device.bytes < least <= plan_setting(config, setting, ()).bytes


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("mesh", "zero"), [(Mesh(dp=2, tp=4), 3), (Mesh(cp=4, tp=2), 3), (Mesh(pp=2, tp=4), 0), (Mesh(dp=4, tp=2), 1)]
)
def test_bounds_count_slots_tables_and_gathered_units(mesh: Mesh, zero: int, reduce: str) -> None:
    """With one-layer units between a large embedding and head, and ranks that exchange rows and gradients."""
    sizes = ["layers=16", "hidden=4096", "heads=32", "kv_heads=8", "ffn=14336", "vocab=128256"]
    config = load(None, [*(f"model.{each}" for each in sizes), *WORDS, f"precision.reduce={reduce}"])
    setting = Setting(mesh, 16, Order("1f1b"), zero, unit_layers=1)
    layout, plan = Work(config).layout_of(setting), plan_setting(config, setting, ()).plan
    for pp, rank in enumerate(plan.mesh.group(("pp",), 0)):
        found = memory(plan, rank)
        state, needed = state_bytes(layout, pp, zero, None), found["total"] - found["activations"] - found["graphs"]
        received = (mesh.pp > 1) * 2 * layout.piece.stream(4096)
        assert needed - received - 8 * 2**20 < state <= needed


@pytest.mark.parametrize("saving", [("none", 0.0), ("attention", 0.0), ("full", 0.0), ("none", 1.0)])
@pytest.mark.parametrize("order", [Order("1f1b"), Order("zb-v"), Order("dualpipe"), Order("seq-1f1b")])
@pytest.mark.parametrize("mesh", [Mesh(dp=2, pp=2), Mesh(pp=2, tp=4), Mesh(pp=4, ep=2)])
def test_larger_microbatches_need_no_less_memory_in_any_order(
    mesh: Mesh, order: Order, saving: tuple[str, float]
) -> None:
    """So a search need not consider them if smaller ones do not fit."""
    sizes = ["layers=16", "hidden=1024", "heads=8", "kv_heads=8", "ffn=4096", "vocab=32000"]
    experts = ["family=mixtral", "experts.num_experts=8", "experts.top_k=2", "experts.intermediate_size=1024"]
    sizes += experts * (mesh.ep > 1)
    work, least = Work(load(None, [*(f"model.{each}" for each in sizes), *WORDS])), list[int]()
    for count in (8, 16, 32):
        setting = Setting(mesh, count, order, recompute=saving[0], offload=saving[1])
        layout = work.layout_of(setting)
        least.append(least_in_any_order(layout, [setting], [(zero, None) for zero in (0, 1, 2, 3)], 0))
    assert least == sorted(least, reverse=True)
