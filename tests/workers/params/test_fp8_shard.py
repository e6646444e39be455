"""Shards of matrices in 8 bits: the casts of the full matrices, however they are cut."""

from __future__ import annotations

import math

import pytest
import torch

from pentad.kernels.fp8.fp8_cast import fp8_cast
from pentad.kernels.fp8.fp8_tensor import Amax, Fp8Forms, Recipe, absolute_maximum
from pentad.kernels.optimizer.param_remainders import nearest
from pentad.schedules.spec.tensors import Tensor
from pentad.schedules.spec.zero_layout import ZeroLayout
from pentad.workers.linear.casts import Casts
from pentad.workers.params.fp8_shard import Fp8Shard
from pentad.workers.params.local_tensor import LocalTensor
from pentad.workers.params.router_bias import RouterBias
from pentad.workers.params.weight_shard import WeightShard

SHAPES = {
    "norm": (200,),
    "plain": (96, 128),
    "a": (256, 384),
    "b": (128, 128),
    "experts": (3, 128, 256),
    "c": (384, 128),
}
NO_BIAS = RouterBias((), torch.zeros(0, 0))
NARROW = ("a", "b", "experts", "c")


def shards_of(recipe: Recipe, dtype: torch.dtype, full: dict[str, torch.Tensor], count: int) -> list[Fp8Shard]:
    """Shards cast from parts of the full tensors, as ranks with these parts would."""
    tensors = [LocalTensor(Tensor(name, shape, 1.0), [[(0, size)] for size in shape]) for name, shape in SHAPES.items()]
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    found = list[Fp8Shard]()
    for index in range(count):
        layout = ZeroLayout(sum(sizes.values()), count, index, sum(sizes[name] for name in NARROW))
        master, start = torch.zeros(layout.part), 0
        for name, size in sizes.items():
            for where, span in layout.overlap(start, start + size):
                master[where] = full[name].flatten()[span]
            start += size
        found.append(Fp8Shard(recipe, dtype, tensors, layout, master[layout.compute_part :]))
    for shard in found:
        shard.measure()
    largest = torch.stack([shard.maxima for shard in found]).amax(0)
    for shard in found:
        shard.maxima.copy_(largest)
        shard.cast()
    return found


def forms_of(recipe: Recipe, full: torch.Tensor) -> Fp8Forms:
    """The cast of a gathered matrix."""
    amax = absolute_maximum(full)
    return fp8_cast(full, recipe, "weight", Amax(amax, amax) if recipe.scaling == "tensor" else None)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("count", [2, 3, 7, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", [Recipe("block"), Recipe("block", power_of_two=True), Recipe("tensor", "e5m2")])
def test_gathered_shards_are_the_forms_of_full_matrices(recipe, dtype, count):
    generator = torch.Generator().manual_seed(count)
    full = {name: torch.randn(shape, generator=generator) ** 3 for name, shape in SHAPES.items()}
    shards, casts = shards_of(recipe, dtype, full, count), Casts(recipe, torch.device("cpu"), dtype)
    gathered, start = torch.cat([shard.values.view(torch.uint8) for shard in shards]), 0
    for name in NARROW:
        matrix = full[name].flatten(0, -2)
        values = gathered[start : start + matrix.numel()].view(torch.float8_e4m3fn).view(matrix.shape)
        start += matrix.numel()
        for shard in shards:
            found, want = (
                casts.gathered(values, shard.scales[name], columns=True),
                forms_of(recipe, nearest(matrix, dtype)),
            )
            for ours, theirs in zip(found, want, strict=True):
                assert ours is not None and theirs is not None
                assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))
                assert torch.equal(ours.scales, theirs.scales) and ours.scales.t().is_contiguous()
    assert not gathered[start:].any()


@pytest.mark.parametrize("count", [2, 3, 64])
def test_a_layout_places_every_parameter_once(count):
    """In the shards, and in full buffers, in order."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    narrow = sum(math.prod(SHAPES[name]) for name in NARROW)
    layouts = [ZeroLayout(sum(sizes), count, index, narrow) for index in range(count)]
    numbers, seen = torch.arange(1, sum(sizes) + 1), torch.zeros(sum(sizes), dtype=torch.int64)
    full = torch.zeros(layouts[0].padded_size, dtype=torch.int64)
    for layout in layouts:
        shard = torch.zeros(layout.part, dtype=torch.int64)
        for where, span in layout.overlap(0, sum(sizes)):
            shard[where] = numbers[span]
            seen[span] += 1
        assert sorted(index for each in layout.padding() for index in range(each.start, each.stop)) == (
            torch.nonzero(shard == 0).flatten().tolist()
        )
        for segment in layout.segments:
            full[segment.full].view(count, -1)[layout.shard_index] = shard[segment.own]
    assert (seen == 1).all()
    tensors = tuple(LocalTensor(Tensor(n, s, 1.0), [[(0, size)] for size in s]) for n, s in SHAPES.items())
    views = WeightShard(tensors, layouts[0], torch.empty(0), None, NO_BIAS).views(full)
    assert torch.equal(torch.cat([view.flatten() for view in views.values()]), numbers)
