"""Compute orders equal those of torch.distributed.pipelining, op for op."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, _Action
from torch.distributed.pipelining.stage import PipelineStage

from pentad.schedules.catalogue import generate
from pentad.schedules.generators.torch_csv import torch_csv
from pentad.schedules.spec.schedule_spec import ScheduleOptions

SIZES = [(ranks, microbatches) for ranks in (2, 4, 8) for microbatches in range(ranks, 2 * ranks + 1)]
KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
Order = list[list[tuple[int, str, int]]]  # by rank: stage, torch's letter, microbatch


@pytest.fixture(scope="module", autouse=True)
def one_mocked_stage() -> Iterator[None]:
    """Mocks the stage class once for all of torch's schedules: mocking it takes longer than building a schedule."""
    with mock.patch.object(mock, "create_autospec", cache(mock.create_autospec)):
        yield


def compute_of(actions: Any) -> list[tuple[int, str, int]]:
    parts = [part for action in actions if action is not None for part in action.sub_actions or [action]]
    named = [(a.stage_index, a.computation_type.name, a.microbatch_index) for a in parts]
    return [(stage, KINDS[name], mb) for stage, name, mb in named if name in KINDS]


def ours(name: str, ranks: int, microbatches: int, **asked: int) -> Order:
    """Our compute order, as torch reads it from our CSV."""
    rows = torch_csv(generate(name, ranks, microbatches, ScheduleOptions(**asked))).splitlines()
    return [compute_of(_Action.from_str(cell) for cell in row.split(",")) for row in rows]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_gpipe_is_torch_s(ranks: int, microbatches: int) -> None:
    assert ours("gpipe", ranks, microbatches) == [*map(compute_of, get_schedule_ops("GPipe", ranks, microbatches))]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_1f1b_is_torch_s_except_for_labels_on_the_last_rank(ranks: int, microbatches: int) -> None:
    """torch 2.13 lists F1 to Fm for the last rank, which correctly runs F0 to F(m-1)."""
    order = [*map(compute_of, get_schedule_ops("1F1B", ranks, microbatches))]
    off = min(mb for _, kind, mb in order[-1] if kind == "F")
    order[-1] = [(stage, kind, mb - off * (kind == "F")) for stage, kind, mb in order[-1]]
    assert ours("1f1b", ranks, microbatches) == order


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_zb_h1_is_torch_s_interleaved_zero_bubble_of_one_stage(ranks: int, rounds: int) -> None:
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks, None
    made = ScheduleInterleavedZeroBubble([stage], rounds * ranks).pipeline_order
    assert ours("zb-h1", ranks, rounds * ranks) == [compute_of(made[rank]) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_zb_v_is_torch_s(ranks: int, rounds: int) -> None:
    order = get_schedule_ops("ZBVZeroBubble", ranks, rounds * ranks, num_stages_per_rank=2)
    assert ours("zb-v", ranks, rounds * ranks) == [*map(compute_of, order)]


def torch_group(ranks: int, microbatches: int) -> int:
    """Microbatches per group in torch; 0 for sizes that torch refuses."""
    group, rest = divmod(microbatches, max(1, microbatches // ranks))
    return 0 if rest else group


SIZES_OF_GROUPS = [(p, m, v) for p in (2, 4, 8) for m in range(p, 4 * p + 1) for v in (2, 3) if torch_group(p, m)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "theirs"), [("interleaved-zb", "InterleavedZeroBubble"), ("interleaved", "Interleaved1F1B")]
)
def test_interleaved_schedules_are_torch_s(name: str, theirs: str) -> None:
    for ranks, microbatches, chunks in SIZES_OF_GROUPS:
        order = get_schedule_ops(theirs, ranks, microbatches, num_stages_per_rank=chunks)
        group = torch_group(ranks, microbatches)
        assert ours(name, ranks, microbatches, chunks=chunks, group=group) == [*map(compute_of, order)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_looped_bfs_is_torch_s_except_that_backwards_come_in_microbatch_order(ranks, microbatches, chunks):
    order = get_schedule_ops("LoopedBFS", ranks, microbatches, num_stages_per_rank=chunks)
    last = microbatches - 1
    expected = [[(s, kind, last - mb if kind == "B" else mb) for s, kind, mb in compute_of(row)] for row in order]
    assert ours("looped-bfs", ranks, microbatches, chunks=chunks) == expected


@pytest.mark.parametrize(("ranks", "microbatches"), [(p, m) for p in (2, 4, 8) for m in range(2 * p, 4 * p + 1, 3)])
def test_dualpipev_is_torch_s(ranks: int, microbatches: int) -> None:
    order = get_schedule_ops("DualPipeV", ranks, microbatches, num_stages_per_rank=2)
    assert ours("dualpipev", ranks, microbatches) == [*map(compute_of, order)]


def test_an_overlapped_pair_is_written_as_torch_writes_it() -> None:
    cell = next(cell for cell in torch_csv(generate("dualpipe", 4, 8)).split(",") if "OVERLAP" in cell)
    action = _Action.from_str(cell)
    assert str(action) == cell
    assert [sub.computation_type.name for sub in action.sub_actions] == ["FORWARD", "FULL_BACKWARD"]


# The output of auto_schedule(p, m) in zbpp_light 0.0.1, the authors' ZB-H1; each op counts up its microbatches.
ZBPP_LIGHT = {
    (2, 3): "FFBWFBWBW FBFBWFBWW",
    (3, 4): "FFFBWFBWBWBW FFBFBWFBWBWW FBFBFBWFBWWW",
    (4, 8): "FFFFBWFBWFBWFBWFBWBWBWBW FFFBFBWFBWFBWFBWFBWBWBWW FFBFBFBWFBWFBWFBWFBWBWWW FBFBFBFBWFBWFBWFBWFBWWWW",
    (6, 7): (
        "FFFFFFBWFBWBWBWBWBWBW FFFFFBFBWFBWBWBWBWBWW FFFFBFBFBWFBWBWBWBWWW "
        "FFFBFBFBFBWFBWBWBWWWW FFBFBFBFBFBWFBWBWWWWW FBFBFBFBFBFBWFBWWWWWW"
    ),
}


@pytest.mark.parametrize(("ranks", "microbatches"), ZBPP_LIGHT)
def test_zb_h1_is_that_of_its_authors(ranks: int, microbatches: int) -> None:
    found = ["".join(kind for _, kind, _ in stream) for stream in ours("zb-h1", ranks, microbatches)]
    torch_s = str.maketrans("FIW", "FBW")
    assert [stream.translate(torch_s) for stream in found] == ZBPP_LIGHT[ranks, microbatches].split()
