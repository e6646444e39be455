"""Ranks and coordinates correspond one to one, and the groups along any axes partition the ranks."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.spec.mesh import ORDER, Axis, Coordinates, Mesh

SIZES = st.integers(1, 4)
MESHES = st.builds(Mesh, dp=SIZES, pp=SIZES, cp=SIZES, tp=SIZES, ep=SIZES)


@given(MESHES)
def test_ranks_and_coordinates_are_one_to_one(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))
    assert len(set(places)) == mesh.size == mesh.dp * mesh.pp * mesh.cp * mesh.tp * mesh.ep
    assert all(0 <= getattr(place, axis) < getattr(mesh, axis) for place in places for axis in ORDER)


@given(MESHES, st.data())
def test_move_changes_only_the_given_coordinates(mesh: Mesh, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.size - 1))
    to = {
        axis: data.draw(st.integers(0, getattr(mesh, axis) - 1)) for axis in data.draw(st.sets(st.sampled_from(ORDER)))
    }
    moved = mesh.coordinates(mesh.move(rank, **to))
    assert moved._asdict() == mesh.coordinates(rank)._asdict() | to


@given(MESHES)
def test_tp_ranks_are_adjacent_and_pipeline_ranks_farthest_apart(mesh: Mesh) -> None:
    """The stride of an axis is the product of the axes inside it: tp, cp, ep, dp, pp."""
    stride = 1
    for axis in ("tp", "cp", "ep", "dp", "pp"):
        for rank in range(mesh.size):
            at = mesh.coordinates(rank)
            if getattr(at, axis) + 1 < getattr(mesh, axis):
                assert mesh.rank(at._replace(**{axis: getattr(at, axis) + 1})) == rank + stride
        stride *= getattr(mesh, axis)


@given(MESHES, st.sampled_from([axes for count in range(6) for axes in combinations(ORDER, count)]))
def test_groups_partition_the_ranks(mesh: Mesh, axes: tuple[Axis, ...]) -> None:
    groups = {mesh.group(axes, rank) for rank in range(mesh.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    size = 1
    for axis in axes:
        size *= getattr(mesh, axis)
    for group in groups:
        assert len(group) == size
        assert all(one < two for one, two in pairwise(group))
        places = [mesh.coordinates(rank)._asdict() for rank in group]
        assert all(len({place[axis] for place in places}) == 1 for axis in ORDER if axis not in axes)


@given(MESHES, st.data())
def test_a_rank_is_in_its_own_group(mesh: Mesh, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.size - 1))
    assert rank in mesh.group(("dp", "ep"), rank)
    assert mesh.group((), rank) == (rank,)
    assert mesh.group(ORDER, rank) == tuple(range(mesh.size))


def test_groups_of_a_small_mesh() -> None:
    mesh = Mesh(dp=2, pp=3, tp=2)
    assert mesh.group(("pp",), 1) == (1, 5, 9)
    assert mesh.group(("tp",), 5) == (4, 5)
    assert mesh.group(("dp", "ep", "cp"), 4) == (4, 6)
    assert mesh.coordinates(11) == Coordinates(dp=1, pp=2, cp=0, tp=1, ep=0)


def test_str_leaves_out_axes_of_size_one() -> None:
    assert str(Mesh()) == "one rank"
    assert str(Mesh(dp=2, tp=4)) == "dp2 x tp4"
    assert str(Mesh(dp=2, tp=4).coordinates(5)) == "dp1 pp0 tp1"
