"""A diagnosis names the ranks that have stopped inside a layer, and copes with processes that do not answer."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.mesh import LAYER_AXES, Axis, Mesh
from pentad.schedules.verify.hang_diagnosis import GROUP_AXES, Position, find_cause

MESHES = [Mesh(tp=2), Mesh(tp=4), Mesh(tp=2, cp=2), Mesh(cp=2, ep=2), Mesh(tp=2, cp=2, ep=2)]
compiled = cache(compile_program)


def place(program: Program, pp: int, name: str) -> int:
    return next(i for i, action in enumerate(program.streams[pp]) if str(action.key) == name)


def positions_in_layers(mesh: Mesh, operations: list[Axis], stopped: dict[int, int]) -> list[Position]:
    """Where ranks stand in 0F0, whose layers run these operations in order. `stopped`: rank -> the number of
    operations after which it stops."""
    counter = place(compiled("1f1b", 1, 2), 0, "0F0")
    begun, inside = [0] * mesh.size, [False] * mesh.size
    moved = True
    while moved:
        moved = False
        for rank in range(mesh.size):
            if inside[rank]:
                group = mesh.group((operations[begun[rank] - 1],), rank)
                ends = all(begun[other] >= begun[rank] for other in group)
                inside[rank], moved = not ends, moved or ends
            elif stopped.get(rank) != begun[rank]:
                begun[rank], inside[rank], moved = begun[rank] + 1, True, True
    axes = [operations[begun[rank] - 1] if inside[rank] else "" for rank in range(mesh.size)]
    return [Position(0, counter, 9.0, waits, axis) for waits, axis in zip(begun, axes, strict=True)]


def as_gpus_tell_it(positions: list[Position], operations: list[Axis]) -> list[Position]:
    """The positions as GPUs report them: a GPU records that it has reached an operation, not that it has left it."""
    begun = (operations[at.waits - 1] if at.waits else "" for at in positions)
    return [at._replace(waits=at.waits or -1, axis=axis) for at, axis in zip(positions, begun, strict=True)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@given(st.data())
def test_ranks_that_stop_between_the_operations_of_a_layer_are_the_causes(device: str, data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    axes = [axis for axis in LAYER_AXES if len(mesh.group((axis,), 0)) > 1]
    operations = data.draw(st.lists(st.sampled_from(axes), min_size=8, max_size=8)) + 2 * axes
    stopped = data.draw(st.dictionaries(st.integers(0, mesh.size - 1), st.integers(0, 7), min_size=1, max_size=2))
    at = positions_in_layers(mesh, operations, stopped)
    told = at if device == "cpu" else as_gpus_tell_it(at, operations)
    found = find_cause(compiled("1f1b", 1, 2), mesh, told)
    assert set(found.causes) == {rank for rank in stopped if not at[rank].axis}
    assert {wait.rank for wait in found.waits} == set(range(mesh.size)) - set(found.causes) and not found.cycle
    for wait in found.waits:
        group = mesh.group((wait.axis,), wait.rank)  # type: ignore[arg-type]
        assert set(wait.peers) == {other for other in group if at[other].waits < at[wait.rank].waits}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_sentence_says_in_which_group_a_rank_waits(device: str) -> None:
    operations: list[Axis] = ["tp"] * 4
    at = positions_in_layers(Mesh(tp=2), operations, {1: 2})
    told = at if device == "cpu" else as_gpus_tell_it(at, operations)
    assert find_cause(compiled("1f1b", 1, 2), Mesh(tp=2), told).sentence == (
        "rank 0 (dp0 pp0) has been in 0F0 (in its tp group) for 9.0 s, waiting for rank 1; "
        "rank 1 (dp0 pp0 tp1) has been in 0F0 for 9.0 s: rank 1 is the cause; 1 rank waits for it"
    )


def test_a_rank_in_a_data_aware_group_waits_for_replicas_behind_it() -> None:
    program, mesh = compiled("1f1b", 1, 2), Mesh(dp=2)
    at = [Position(0, place(program, 0, name), 9.0) for name in ("0BW0", "0F0")]
    assert set(find_cause(program, mesh, at).causes) == {0, 1}, "replicas share no layers"
    found = find_cause(program, mesh, at, inner_axes=GROUP_AXES)
    assert found.causes == (1,) and [(wait.rank, wait.peers) for wait in found.waits] == [(0, (1,))]


SILENT = [("1F0", "0BW0", False), ("NORM", "NORM", False), ("VALIDATE", "0BW0", True)]


@pytest.mark.parametrize(("waiting", "silent", "post_validation"), SILENT)
def test_a_process_that_does_not_answer_is_the_cause_although_it_has_launched_what_others_wait_for(
    waiting: str, silent: str, post_validation: bool
) -> None:
    program, mesh = compiled("1f1b", 2, 4, post_validation=post_validation), Mesh(pp=2)
    at = [Position(1, place(program, 0, silent), 9.0), Position(1, place(program, 1, waiting), 9.0)]
    found = find_cause(program, mesh, at, {0})
    assert found.causes == (0,) and [wait.rank for wait in found.waits] == [1]
    assert f"has been in {silent}, without answering, for 9.0 s: rank 0 is the cause" in found.sentence


def test_a_rank_past_what_a_silent_one_has_joined_is_not_blocked_by_it() -> None:
    program = compiled("1f1b", 2, 4)
    at = [Position(1, place(program, 0, "STEP"), 9.0), Position(1, place(program, 1, "STEP"), 9.0)]
    assert find_cause(program, Mesh(pp=2), at, {0}).waits == ()
