"""What `precision.reduce: bfloat16` changes in a plan: seconds of reductions, and memory for rounded gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import costs_of, memory
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan

EIGHT = ("layers=32", "hidden=4096", "heads=32", "kv_heads=8", "ffn=14336", "vocab=128256")


def plans(*words: str, device: str = "cuda") -> list[Plan]:
    """Two plans, which reduce gradients in float32 and in bfloat16."""
    batch = ["batch.global_batch_size=64", "batch.sequence_length=4096", "mesh.pp=1"]
    batch += ["schedule.name=1f1b", "schedule.microbatches=2", "cluster.gpu=NVIDIA H200"]
    given = [*(f"model.{each}" for each in EIGHT), *batch, *words]
    reduced = (f"precision.reduce={dtype}" for dtype in ("float32", "bfloat16"))
    return [make_plan(load(None, [*given, each]), device) for each in reduced]


def test_float32_is_the_default() -> None:
    assert not make_plan(load(None), "cpu").bf16_reduce
    assert [each.bf16_reduce for each in plans("mesh.dp=2")] == [False, True]


@pytest.mark.parametrize("zero", [0, 1])
def test_reductions_take_about_half_as_long_between_hosts_with_one_replica_each(zero: int) -> None:
    """Each replica is the eight tensor ranks of a host. Rounding, which reads and writes memory, takes time, too."""
    wide, narrow = map(costs_of, plans("mesh.tp=8", "mesh.dp=4", f"zero.stage={zero}"))
    for full, half in zip(wide.reduce, narrow.reduce, strict=True):
        assert full / 2 < half < 0.6 * full
    assert replace(narrow, reduce=wide.reduce) == wide, "other costs change"


@pytest.mark.parametrize("zero", [0, 1])
def test_they_take_longer_where_several_replicas_share_a_host(zero: int) -> None:
    """All ranks of a host exchange terms with those of other hosts, whereas a ring passes on sums."""
    wide, narrow = map(costs_of, plans("mesh.dp=32", f"zero.stage={zero}"))
    assert sum(narrow.reduce) > sum(wide.reduce)


@pytest.mark.parametrize(("transport", "zero"), [("peer", 0), ("peer", 1), ("peer", 3), ("nccl", 0), ("nccl", 2)])
def test_memory_has_what_gradients_are_rounded_into(transport: str, zero: int) -> None:
    """2**25 elements at once: in bfloat16 both those sent and those received, in float32 those received from peers."""
    words = "mesh.dp=4", f"zero.stage={zero}", f"cluster.transport={transport}"
    wide, narrow = (memory(each, 0) for each in plans(*words))
    arrive = 2**25 * 4 if transport == "peer" and zero else 0
    assert narrow["slots"] - wide["slots"] == 2 * 2**25 * 2 - arrive
    assert narrow["total"] - wide["total"] == narrow["slots"] - wide["slots"]
    assert {**narrow, "slots": 0, "total": 0} == {**wide, "slots": 0, "total": 0}


def test_other_dtypes_are_refused_in_one_sentence() -> None:
    with pytest.raises(PentadError) as refused:
        load(None, ["precision.reduce=float16"])
    expected = "expected one of float32 or bfloat16 (did you mean bfloat16?)"
    assert str(refused.value) == f"precision.reduce is 'float16': {expected}"
