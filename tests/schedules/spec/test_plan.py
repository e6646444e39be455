"""Plans split layers evenly over stages; sizes are pure functions."""

from __future__ import annotations

import pickle
import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.data import DataSpec, SourceSpec
from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.optimizer import OptimizerSpec
from pentad.schedules.spec.plan import ParamShard, Plan, num_units, split_layers, split_layers_into_units
from pentad.schedules.spec.tensors import active_parameters, head_in_layers, num_parameters

MODEL = ModelSpec(layers=8, hidden=128, heads=8, kv_heads=4, ffn=384, vocab=4096)
DATA = DataSpec((SourceSpec("pydoc", "builtin:pydoc"),))
OPTIMIZER = OptimizerSpec(LearningRate(3e-3, 3e-4, 10, 110), 0.9, 0.95, 1e-8, 0.1, clip_norm=1.0)


def one_each(stages: int) -> list[tuple[int]]:
    return [(stage,) for stage in range(stages)]


def mirrored(stages: int) -> list[tuple[int, int]]:
    return [(stage, stages - 1 - stage) for stage in range(stages)]


@given(st.integers(1, 60), st.integers(1, 12), st.floats(0, 6))
def test_stages_partition_the_layers_in_order(layers: int, stages: int, head: float) -> None:
    parts = split_layers(max(layers, stages), one_each(stages), head)
    assert len(parts) == stages
    assert [number for part in parts for number in part.numbers] == list(range(max(layers, stages)))
    assert all(part.numbers for part in parts)
    assert [part.has_embedding for part in parts] == [True] + [False] * (stages - 1)
    assert [part.has_head for part in parts] == [False] * (stages - 1) + [True]


@given(st.integers(1, 60), st.integers(1, 12))
def test_stages_differ_by_one_layer_at_most(layers: int, stages: int) -> None:
    sizes = [len(part.numbers) for part in split_layers(max(layers, stages), one_each(stages))]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes)


@given(
    st.sampled_from([one_each(2), one_each(3), one_each(5), mirrored(2), mirrored(4)]),
    st.integers(0, 7),
    st.floats(0, 6),
)
def test_no_other_split_has_a_less_loaded_busiest_rank(placement: list, more: int, head: float) -> None:
    """All splits are tried; the head adds to the load of the last stage."""
    stages = len(placement)
    layers = stages + more

    def busiest(cuts: tuple[int, ...]) -> float:
        sizes: list[float] = [end - start for start, end in pairwise((0, *cuts, layers))]
        sizes[-1] += head
        return max(sum(sizes[stage] for stage in held) for held in placement)

    chosen = tuple(part.end for part in split_layers(layers, placement, head))[:-1]
    assert busiest(chosen) == pytest.approx(min(map(busiest, combinations(range(1, layers), stages - 1))))


def test_many_layers_are_split_in_little_time() -> None:
    began = time.process_time()
    sizes = [len(part.numbers) for part in split_layers(10_000, one_each(1024), 2.5)]
    assert time.process_time() - began < 2.0
    assert (sum(sizes), set(sizes[:-1])) == (10_000, {9, 10})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_units_cover_the_layers_of_their_stage_evenly(sizes: list[int], unit_layers: int) -> None:
    """In a stage of several units, the embedding and the head are units of their own."""
    stages = split_layers(sum(sizes), one_each(len(sizes)))
    for stage in stages:
        count = num_units(stage, unit_layers)
        units = split_layers_into_units([stage], [count])
        assert len(units) == count and [number for unit in units for number in unit.numbers] == list(stage.numbers)
        assert any(unit.has_embedding for unit in units) == stage.has_embedding
        assert any(unit.has_head for unit in units) == stage.has_head
        own = [unit for unit in units if unit.numbers]
        lengths = [len(unit.numbers) for unit in own]
        assert max(lengths) <= unit_layers and max(lengths) - min(lengths) <= 1
        assert count == 1 or not any(unit.has_embedding or unit.has_head for unit in own)


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(
        PentadError, match=r"^model\.layers is 3: expected at least one for each of 4 pipeline stages \(mesh\.pp\)$"
    ):
        split_layers(3, one_each(4))
    assert [tuple(part.numbers) for part in split_layers(4, one_each(4))] == [(0,), (1,), (2,), (3,)]


def test_the_number_of_parameters() -> None:
    head_dim = 128 // 8
    matrices = [(128, 8 * head_dim), (128, 4 * head_dim), (128, 4 * head_dim), (8 * head_dim, 128)]
    matrices += [(128, 384), (128, 384), (384, 128), (2, 128)]  # gate, up, down, and two norms
    assert MODEL.qk_head_dim == head_dim
    assert active_parameters(MODEL, 0) == sum(rows * columns for rows, columns in matrices)
    assert num_parameters(MODEL) == 8 * active_parameters(MODEL, 0) + 2 * 4096 * 128 + 128  # embedding, head, last norm


def test_the_head_in_layers_is_a_ratio_of_flops() -> None:
    """Per token, a layer multiplies by its weights, and causal attention has two products with `length` / 2 tokens."""
    assert head_in_layers(MODEL, 0) == 4096 * 128 / active_parameters(MODEL, 0)
    assert head_in_layers(MODEL, 1024) == 4096 * 128 / (active_parameters(MODEL, 0) + 2 * 1024 // 2 * 128)


def test_the_size_of_a_microbatch() -> None:
    batch = BatchSpec(global_batch_size=32, sequence_length=128, microbatches=8, replicas=2)
    assert (batch.micro_batch_size, batch.tokens) == (2, 4096)


def plan(name: str, mesh: Mesh) -> Plan:
    program = compile_program(name, mesh.pp, 8, replicas=mesh.dp)
    layers = split_layers(8, program.placement)
    batch = BatchSpec(16, 128, 8, mesh.dp)
    return Plan("p", mesh, program, layers, MODEL, batch, OPTIMIZER, DATA, 0, "float32", "cpu", "gloo")


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_the_owner_of_a_stage_is_its_first_holder(name: str) -> None:
    made = plan(name, Mesh(dp=2, pp=4))
    for stage in range(made.program.stages):
        owner = made.owner(ParamShard(stage))
        assert stage in made.stages_of(owner)
        assert made.mesh.coordinates(owner).dp == 0
        assert owner == min(rank for rank in range(made.mesh.size) if stage in made.stages_of(rank))


def test_a_pickled_plan_is_equal() -> None:
    made = plan("zb-h2", Mesh(dp=2, pp=4))
    received = pickle.loads(pickle.dumps(made))
    assert received == made
    assert received.program.hash == made.program.hash
