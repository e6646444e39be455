"""The planner's communication volumes equal what layers send, counted at every collective, and what programs contain;
and every message fits into the slots through which ranks of one host exchange rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import fake_groups
import pytest
import torch
from fake_groups import FAMILIES, in_tiles, make_stage
from plans import MODEL, TILE, plan_of

from pentad.orchestrator.activations.allocations import BYTES, piece_of
from pentad.orchestrator.planning.comm_volume import (
    CommKind,
    CommVolume,
    collective_bytes,
    comm_volume,
    layer_volume,
    stage_volume,
)
from pentad.orchestrator.planning.hardware import NODE_GPUS, ranks_on_host
from pentad.schedules.passes.recompute import PARTS
from pentad.schedules.spec import row_slots
from pentad.schedules.spec.mesh import LAYER_AXES, Axis, Mesh
from pentad.schedules.spec.model import Fp8Spec
from pentad.schedules.spec.plan import ALIGNMENT, ParamShard, Plan
from pentad.schedules.spec.row_slots import row_slot_elements
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import num_parameters
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.parallel import cp_ring, cp_ulysses
from pentad.workers.parallel.async_ops import AsyncResult, run_to_completion
from pentad.workers.parallel.row_exchange import RowGroup


@pytest.fixture
def sent(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommVolume]:
    """Records everything that layers send. Tiles are small, so that even small products have several."""
    found, caches = CommVolume(), (stage_volume, layer_volume)

    def pass_on(ring: cp_ring.Ring, block: torch.Tensor, buffer: torch.Tensor) -> AsyncResult[torch.Tensor]:
        fits_into_slot(ring.group, block.nbytes)
        found.add("cp", "ring", 1, block.nbytes)
        return fake_groups.pass_on(ring, block, buffer)

    def counted(kind: Any) -> Any:
        def call(to: torch.Tensor, source: torch.Tensor, group: Any, async_op: bool = False) -> None:
            found.add(group.axis, kind, 1, abs(to.nbytes - source.nbytes))
            getattr(fake_groups, kind)(to, source, group)

        return call

    def exchange(group: RowGroup, parts: list[torch.Tensor], joined: Any) -> AsyncResult[list[torch.Tensor]]:
        fits_into_slot(group, sum(each.nbytes for each in parts))
        found.add("cp", "all_to_all", 1, sum(each.nbytes for each in parts) * (group.size - 1) // group.size)
        return fake_groups.exchange(group, parts, joined)

    monkeypatch.setattr(cp_ring, "pass_on", pass_on)
    monkeypatch.setattr(cp_ulysses, "_exchange", exchange)
    fake_groups.replace_collectives(monkeypatch, counted("all_gather"), counted("reduce_scatter"))
    monkeypatch.setattr(row_slots, "TILE_TOKENS", TILE)
    for cache in caches:
        cache.cache_clear()
    yield found
    for cache in caches:
        cache.cache_clear()


class SlotSize(NamedTuple):
    """Poses as row slots of this size: rows that do not fit fail the test."""

    bytes: int

    def fits(self, elements: int, like: torch.Tensor) -> bool:
        assert elements * like.element_size() <= self.bytes
        return False  # so the process group sends it


def fits_into_slot(group: RowGroup, size: int) -> None:
    assert group.rows is not None
    group.rows.fits(size, torch.empty(0, dtype=torch.uint8))


def test_products_of_many_tokens_have_tiles() -> None:
    assert [row_slots.num_tiles(tokens) for tokens in (1, 8191, 8192, 16383, 16384, 65536)] == [1, 1, 1, 1, 2, 8]


AXES = [
    {"tp": 2},
    {"tp": 4},
    {"cp": 2},
    {"cp": 2, "cp_method": "all_gather"},
    {"cp": 2, "cp_method": "ulysses", "tp": 2},
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("mode", "axes"),
    [
        *(("none", axes) for axes in AXES),
        *((mode, AXES[0]) for mode in ("selective", "full")),
        *(("attention", axes) for axes in AXES),
        *(("core_attn", axes) for axes in AXES),
        *((part, AXES[0]) for part in PARTS if part != "core_attn"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product((*PARTS, ",".join(PARTS)), AXES[1:])),
    ],
)
@pytest.mark.parametrize("family", ["llama", "deepseek", "deepseek with mtp"])
def test_layers(sent, corpus, family, mode, axes):
    for index in range(3):
        check(sent, plan_of("gpipe", 1, 3, 1, corpus, model=FAMILIES[family], recompute=mode, **axes), index)


@pytest.mark.parametrize("axes", [AXES[0], AXES[4], pytest.param(AXES[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["attention", pytest.param("mlp,attn_proj", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_layers_that_recompute_some_rows(sent, corpus, family, mode, axes):
    plan = plan_of("gpipe", 1, 3, 1, corpus, model=FAMILIES[family], recompute=mode, recompute_fraction=0.5, **axes)
    plan = replace(plan, batch=replace(plan.batch, sequence_length=32))
    assert 0 < piece_of(plan).rest.tokens < plan.slice_tokens
    check(sent, plan, 1)


@pytest.mark.parametrize("family", ["llama", "deepseek with mtp"])
def test_chunks_of_logits(sent, corpus, family):
    check(sent, plan_of("gpipe", 1, 3, 1, corpus, model=FAMILIES[family], logit_rows=5, tp=2), 2)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_step_with_chunks_of_logits(sent, corpus, mode):
    """The forward that RECOMPUTE repeats scatters no gradient."""
    plan = plan_of("gpipe", 1, 1, 1, corpus, recompute=mode, logit_rows=5, tp=2)
    for _, run in phases(plan, 0, lambda _: SlotSize(plan.slice_tokens * 2**20)):
        run()
    planned = comm_volume(plan, 0)
    assert {key: volume for key, volume in planned.items() if key.axis == "tp"} == sent


def cases_in_8_bits() -> list[Any]:
    always = [("llama", 128, "none", "block"), ("llama", 64, "attention", "tensor")]
    families = ["llama", "olmo2", "mixtral", "deepseek"]
    sizes = product(families, [128, 64], ["none", "attention", "core_attn", "attn_proj"], ["tensor", "row", "block"])
    return [pytest.param(*case, marks=[] if case in always else [pytest.mark.slow]) for case in sizes]


@pytest.mark.parametrize(("family", "length", "mode", "scaling"), cases_in_8_bits())
def test_layers_in_8_bits(sent, corpus, family, length, mode, scaling):
    """One of the first stage's two layers is in the compute dtype. Half a sequence is no multiple of a tile."""
    plan = plan_of("gpipe", 1, 2, 1, corpus, model=in_tiles(FAMILIES[family]), recompute=mode, tp=2)
    plan = replace(plan, fp8=Fp8Spec(scaling, skip_first=1), batch=replace(plan.batch, sequence_length=length))
    check(sent, plan, 0)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_a_head_in_8_bits(sent, corpus, family):
    """Its gradient is scattered at once, but that of multi-token prediction in tiles."""
    model = replace(in_tiles(FAMILIES[family]), vocab=512)
    plan = plan_of("gpipe", 1, 2, 1, corpus, model=model, tp=2)
    check(sent, replace(plan, fp8=Fp8Spec("block", head=True), batch=replace(plan.batch, sequence_length=128)), 1)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 4, "tp": 2}])
@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
def test_expert_parallel_layers(sent, corpus, family, axes):
    plan = plan_of("gpipe", 1, 3, 1, corpus, model=replace(FAMILIES[family], vocab=300), **axes)
    check(sent, plan, 1, device="cuda")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", [{"ep": 4, "tp": 2}, {"ep": 2}])
@pytest.mark.parametrize("mode", ["full", "none"])
def test_tokens_of_experts_are_sent_in_8_bits(sent, corpus, mode, axes):
    plan = plan_of("gpipe", 1, 2, 1, corpus, model=in_tiles(FAMILIES["mixtral"]), recompute=mode, **axes)
    plan = replace(plan, fp8=Fp8Spec("block", experts=True), batch=replace(plan.batch, sequence_length=128))
    check(sent, plan, 1, device="cuda")


@pytest.mark.sampled(11)
@pytest.mark.parametrize("axes", [*AXES, {"ep": 2, "tp": 2}])
@pytest.mark.parametrize("mode", ["none", "attention"])
@pytest.mark.parametrize("family", ["llama", "deepseek with mtp"])
def test_an_exchange_by_peer_copies_takes_one_slot(corpus, monkeypatch, family, mode, axes):
    """Even the result of a product, however many tokens it has."""
    monkeypatch.setattr(row_slots, "TILE_TOKENS", TILE)
    plan, rows = plan_of("gpipe", 1, 3, 1, corpus, model=FAMILIES[family], recompute=mode, **axes), SlotCount()
    piece = piece_of(plan)._replace(device="cuda")
    for index in range(3):
        for phase, run in phases(plan, index, lambda _: rows):
            rows.taken = 0
            run()
            volume = stage_volume(plan.model, plan.layers[index], piece, phase, copied=True)
            assert rows.taken == sum(each.operations for each in volume.values()), phase


class SlotCount:
    """Poses as row slots and counts those taken; other ranks send zeros."""

    taken = 0

    def fits(self, elements: int, like: torch.Tensor) -> bool:
        return True

    def slot(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        self.taken += 1
        return like.new_empty(shape)

    def gather(self, own: torch.Tensor, full: torch.Tensor, *, keep: bool) -> None:
        self.slot(own.shape, own)
        full.copy_(own.expand_as(full))

    def read(self, parts: Sequence[tuple[int, int, torch.Tensor]], readers: Sequence[int] | None = None) -> None:
        for _, _, target in parts:
            target.zero_()


def check(sent: CommVolume, plan: Plan, index: int, device: str = "cpu") -> None:
    """Runs F, RECOMPUTE and B of a stage and compares the bytes sent by each."""
    piece, copying = piece_of(plan)._replace(device=device), replace(plan, transport="peer")
    for phase, run in phases(plan, index, lambda axis: SlotSize(row_slot_elements(copying, axis) * BYTES[plan.dtype])):
        sent.clear()
        run()
        assert sent == stage_volume(plan.model, plan.layers[index], piece, phase), phase


def phases(plan: Plan, index: int, rows_of: Callable[[Axis], Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """F, RECOMPUTE and B of a stage, whose ranks exchange rows along each axis through the slots of `rows_of(axis)`."""
    stage = make_stage(plan, index)
    groups: Any = stage.layer_context
    for axis in (axis for axis in LAYER_AXES if getattr(plan.mesh, axis) > 1):
        groups = groups._replace(**{axis: replace(getattr(groups, axis), rows=rows_of(axis))})
    stage.layer_context = groups
    tokens = torch.arange(plan.slice_tokens)
    shape = plan.sequence_parallel_tokens, plan.model.hidden
    received = None if stage.first else torch.randn(shape, dtype=torch.float64)
    dy = None if stage.last else torch.randn(shape, dtype=torch.float64)
    mode = plan.recompute_mode(index)
    mtp_tokens = tokens.expand(plan.model.mtp_layers, -1) if stage.last else None
    ends = tokens if stage.first else None, tokens if stage.last else None
    yield "F", lambda: run_to_completion(stage.forward(0, StageInputs(received, *ends, mtp_tokens)))
    if mode != "none":
        yield mode, lambda: stage.recompute(0)
    yield "B", lambda: run_to_completion(stage.backward_input(0, dy))


def test_a_step_is_the_sum_of_its_instructions(corpus: str) -> None:
    plan = plan_of("1f1b", 2, 2, 4, corpus, tp=2, memory_options=MemoryOptions(zero=1))
    found, piece = comm_volume(plan, 0), piece_of(plan)
    once: Counter[CommKind] = Counter()
    for phase in ("F", "B"):
        volumes = stage_volume(plan.model, plan.layers[0], piece, phase)
        once.update({kind: volume.bytes for kind, volume in volumes.items()})
    stream = plan.sequence_parallel_tokens * plan.model.hidden * 8
    tp = {kind: volume.bytes for kind, volume in found.items() if kind.axis == "tp"}
    assert tp == {kind: 4 * size for kind, size in once.items()}
    assert found[CommKind("pp", "SEND_F")] == (4, 4 * stream)
    dp = {kind.kind: volume.bytes for kind, volume in found.items() if kind.axis == "dp"}
    assert dp == collective_bytes(plan, 0)


@pytest.mark.parametrize("zero", range(4))
def test_zero_sends_the_volumes_of_its_paper(corpus: str, zero: int) -> None:
    """arXiv 1910.02054, section 7: 2N bytes of gradients and weights, 3N if weights are gathered twice."""
    plan = plan_of("gpipe", 4, 1, 2, corpus, memory_options=MemoryOptions(zero=zero))
    found = {kind.kind: volume for kind, volume in comm_volume(plan, 0).items()}
    size = plan.num_zero_shards(ParamShard(0)) * plan.zero_shard_size(ParamShard(0))
    assert 0 <= size - num_parameters(MODEL) < 4 * ALIGNMENT, "shards are padded"
    moved = sum(volume.bytes for volume in found.values()) / 8 / size
    assert moved == pytest.approx(2 * 3 / 4, rel=1e-3)  # (n - 1) / n of 2N: all stages of a rank are gathered once
    kinds = {0: {"ALL_REDUCE"}}.get(zero, {"ALL_GATHER", "REDUCE_SCATTER"})
    assert found.keys() == kinds
    assert all(volume.operations == 1 for volume in found.values())


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_in_bfloat16_are_a_half_or_a_quarter_of_the_bytes(corpus: str, zero: int, dtype: str) -> None:
    plan = plan_of("gpipe", 4, 1, 2, corpus, dtype, memory_options=MemoryOptions(zero=zero))
    wide, narrow = (comm_volume(each, 0) for each in (plan, replace(plan, bf16_reduce=True)))
    for kind, (operations, size) in wide.items():
        ratio = BYTES["bfloat16"] / BYTES[dtype] if kind.kind in ("ALL_REDUCE", "REDUCE_SCATTER") else 1
        assert narrow[kind] == (operations, ratio * size)


@pytest.mark.parametrize(
    ("mesh", "crossing"),
    [
        (Mesh(tp=8, pp=2), {"pp"}),
        (Mesh(tp=2, dp=8), {"dp"}),
        (Mesh(tp=4, cp=4, dp=2), {"cp", "dp"}),
        (Mesh(dp=8), set()),
    ],
)
def test_axes_cross_hosts_where_their_ranks_span_more_than_one(mesh, crossing):
    assert NODE_GPUS == 8
    axes: tuple[Axis, ...] = ("dp", "pp", "cp", "tp", "ep")
    assert {axis for axis in axes if ranks_on_host(mesh, [axis]) < getattr(mesh, axis)} == crossing
