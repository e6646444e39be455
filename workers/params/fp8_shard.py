"""A rank's ZeRO shard of the matrices that are gathered in 8 bits, cast from its master weights once a step.

The casts equal those of the full matrices: all holders of a shard agree on the absolute maximum of each tile, of which
each may hold only a few elements. So every rank has all scales, and only values are gathered. Parts of a shard, and
thus of a matrix, are multiples of 128 x 128 elements in C order and consist of parts of rows 128 elements long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_cast import fp8_cast
from pentad.kernels.fp8.fp8_tensor import E4M3, TILE, Amax, Recipe, scale_of
from pentad.kernels.optimizer.param_remainders import nearest
from pentad.schedules.spec.zero_layout import ZeroLayout
from pentad.workers.params.local_tensor import LocalTensor

PIECE = 2**10  # rows of 128 x 128 elements cast at a time: 32 MiB of scratch memory in bfloat16


class MatrixPart(NamedTuple):
    """A shard's part of a matrix: its elements `span` in C order, at `where` among the shard's 8-bit elements. `tiles`
    are the matrix's tiles among all maxima, in C order, with `across` tiles side by side. A tile has `height` rows of
    128 elements; a tile that is the full matrix has all of them."""

    where: slice
    span: slice
    tiles: slice
    across: int
    height: int


class Fp8Shard:
    """`values` are the 8-bit elements. They and the scales correspond to the `master` weights, float32 (or float64),
    unless the shard `is_stale`."""

    def __init__(
        self, recipe: Recipe, dtype: torch.dtype, tensors: Sequence[LocalTensor], layout: ZeroLayout, master: Tensor
    ) -> None:
        """The shard of the last local tensors, as many as `layout` says; `dtype` is the compute dtype."""
        self.recipe, self.dtype, self.master = recipe, dtype, master
        self.values = torch.zeros_like(master, dtype=E4M3)
        self.scales, self.parts, self.is_stale = dict[str, Tensor](), list[MatrixPart](), True
        start, tiles, border = 0, 0, layout.size - layout.in_8_bits
        for local in tensors:
            begin, start = start, start + local.size
            if begin < border:
                continue
            down, across = (1, 1) if recipe.scaling == "tensor" else _tiles(local)
            self.scales[local.name] = master.new_zeros(across, down, dtype=torch.float32).t()
            for index, span in layout.overlap(begin, start):
                where = slice(index.start - layout.compute_part, index.stop - layout.compute_part)
                found = slice(tiles, tiles + down * across)
                self.parts.append(MatrixPart(where, span, found, across, local.size // TILE // (down * across)))
            tiles += down * across
        self.maxima = master.new_zeros(tiles, dtype=torch.float32)

    def measure(self) -> None:
        """Writes the absolute maxima of this rank's elements of each tile."""
        self.maxima.zero_()
        for part in self.parts:
            rows = torch.linalg.vector_norm(self.master[part.where].view(-1, TILE), torch.inf, dim=1)
            tiles, own = self._tiles_around(part)
            padded = rows.new_zeros(len(tiles), part.height, tiles.shape[1], dtype=torch.float32)
            padded.view(-1)[own] = nearest(rows, self.dtype).float()
            tiles.copy_(padded.amax(1))

    def cast(self) -> None:
        """Writes scales and values; `maxima` must by then be those of all elements of each tile."""
        recipe = Recipe("row", power_of_two=self.recipe.power_of_two)
        counts = [each.numel() for each in self.scales.values()]
        of_tiles = scale_of(self.maxima, E4M3, power_of_two=recipe.power_of_two).split(counts)
        for scales, found in zip(self.scales.values(), of_tiles, strict=True):
            scales.copy_(found.view(scales.shape))
        for part in self.parts:
            tiles, own = self._tiles_around(part)
            of_rows = tiles[:, None].repeat(1, part.height, 1).flatten()[own, None]
            both = (each[part.where].view(-1, TILE) for each in (self.master, self.values))
            pieces = (each.split(PIECE * TILE) for each in (*both, of_rows))
            for given, out, amax in zip(*pieces, strict=True):
                weights = nearest(given, self.dtype).contiguous()
                form = fp8_cast(weights, recipe, "weight", Amax(amax, amax), columns=False)
                assert form.rows is not None
                out.copy_(form.rows.values)
        self.is_stale = False

    def _tiles_around(self, part: MatrixPart) -> tuple[Tensor, slice]:
        """The maxima [.., columns] of the rows of tiles in which the part has elements, and the part's slice of the
        rows of 128 elements in these tiles, in C order."""
        across, length = part.across, part.across * part.height
        first, end = part.span.start // TILE, part.span.stop // TILE
        above, below = first // length, -(-end // length)
        tiles = self.maxima[part.tiles].view(-1, across)[above:below]
        return tiles, slice(first - above * length, end - above * length)


def _tiles(local: LocalTensor) -> tuple[int, int]:
    """Rows and columns of tiles of a matrix, or of the matrices of experts stacked on top of each other."""
    columns = local.shape[-1]
    return local.size // columns // TILE, columns // TILE
