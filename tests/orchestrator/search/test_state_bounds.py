"""Where no mesh holds the state of its ranks the search ends at once, and says what each needs at least."""

from __future__ import annotations

from typing import Any

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.fit import DeviceMemory
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
