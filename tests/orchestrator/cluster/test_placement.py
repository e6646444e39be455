"""The order of ranks on places; test_group.py tests how places are reserved."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.orchestrator.cluster.placement import Place, order_places
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Mesh

sides = st.integers(1, 3)
meshes = st.builds(Mesh, dp=sides, pp=sides, cp=st.integers(1, 2), tp=st.integers(1, 2), ep=st.integers(1, 2))


def on_nodes(sizes: list[int]) -> list[Place]:
    """Places filled node by node, with the GPUs of each node numbered from 0."""
    places: list[Place] = []
    for number, size in enumerate(sizes):
        places += [Place(len(places) + gpu, f"node{number}", gpu) for gpu in range(size)]
    return places


@st.composite
def placed_meshes(draw: st.DrawFn, unit: str = "tp") -> tuple[Mesh, list[Place]]:
    """A mesh on nodes whose sizes are multiples of a tp group's size, or of a replica's."""
    mesh = draw(meshes)
    step = mesh.tp if unit == "tp" else mesh.size // mesh.dp
    sizes, left = [], mesh.size
    while left:
        sizes.append(step * draw(st.integers(1, left // step)))
        left -= sizes[-1]
    return mesh, on_nodes(sizes)


@given(placed_meshes())
def test_every_place_becomes_one_rank(case: tuple[Mesh, list[Place]]) -> None:
    mesh, places = case
    assert sorted(order_places(places, mesh)) == [place.bundle for place in places]


@given(placed_meshes(), st.randoms(use_true_random=False))
def test_the_order_in_which_places_are_reported_does_not_matter(
    case: tuple[Mesh, list[Place]], dice: random.Random
) -> None:
    mesh, places = case
    mixed = dice.sample(places, len(places))
    assert order_places(mixed, mesh) == order_places(places, mesh)


@given(placed_meshes())
def test_a_tp_group_stays_inside_a_node(case: tuple[Mesh, list[Place]]) -> None:
    mesh, places = case
    order = order_places(places, mesh)
    for rank in range(mesh.size):
        assert len({places[order[member]].node for member in mesh.group(("tp",), rank)}) == 1


@given(placed_meshes("replica"))
def test_no_replica_is_split_if_nodes_hold_complete_replicas(case: tuple[Mesh, list[Place]]) -> None:
    mesh, places = case
    order = order_places(places, mesh)
    for rank in range(mesh.size):
        replica = mesh.group(("pp", "cp", "tp", "ep"), rank)
        assert len({places[order[member]].node for member in replica}) == 1


@given(meshes)
def test_pipeline_neighbours_on_a_node_are_one_stage_of_ranks_apart(mesh: Mesh) -> None:
    order = order_places(on_nodes([mesh.size]), mesh)
    for rank in range(mesh.size):
        gpus = [order[member] for member in mesh.group(("pp",), rank)]
        assert gpus == list(
            range(gpus[0], gpus[0] + mesh.pp * mesh.cp * mesh.tp * mesh.ep, mesh.cp * mesh.tp * mesh.ep)
        )


def test_gpus_of_a_node_are_used_in_index_order() -> None:
    places = [Place(0, "a", 3), Place(1, "a", 1), Place(2, "a", 2), Place(3, "a", 0)]
    assert order_places(places, Mesh(pp=4)) == (3, 1, 2, 0)


def test_full_nodes_come_before_partial_ones() -> None:
    places = on_nodes([6, 4, 2])  # replicas of 4 ranks: one fits on the node of 4, the next starts on the node of 6
    order = order_places(places, Mesh(dp=3, pp=4))
    first = [places[order[rank]].node for rank in Mesh(dp=3, pp=4).group(("pp",), 0)]
    assert first == ["node1"] * 4


def test_a_tp_group_that_would_span_nodes_is_refused() -> None:
    with pytest.raises(PentadError, match=r"mesh.tp is 2, but nodes have room for 3, 1 ranks"):
        order_places(on_nodes([3, 1]), Mesh(tp=2, pp=2))
