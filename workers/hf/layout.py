"""How files store weights differently from pentad: the row order of rotary parts, and 8-bit blocks with scales.

Weights in 8 bits are fp8 E4M3 with one scale per block, as DeepSeek-V3 was released.
"""

from __future__ import annotations

from typing import Any

import torch

from pentad.kernels.fp8.fp8_tensor import TILE, Recipe, quantize
from pentad.schedules.ir.errors import PentadError
from pentad.workers.hf.names import FileTensor, Rotary

FP8_BLOCK = (TILE, TILE)  # of what is written
FP8_DTYPE = "F8_E4M3"  # in safetensors
SCALE_SUFFIX = "_scale_inv"  # a weight's name + this: the name of its scales

BlockSize = tuple[int, int]  # rows and columns


def from_file(tensor: torch.Tensor, part: FileTensor) -> torch.Tensor:
    """A tensor of the files in pentad's form."""
    if part.stack is None:
        return to_half_split(tensor, part.rotary)
    if part.stack.is_transposed:
        tensor = tensor.transpose(1, 2)
    return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1) if part.stack.alternates else tensor.contiguous()


def to_file(tensor: torch.Tensor, part: FileTensor) -> torch.Tensor:
    """The inverse of `from_file`, of the tensor's elements in any shape."""
    if part.stack is None:
        return to_interleaved(tensor.view(part.shape), part.rotary)
    experts, *rows = part.shape
    tensor = tensor.view(experts, *(reversed(rows) if part.stack.is_transposed else rows))
    if part.stack.alternates:
        tensor = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)
    return tensor.transpose(1, 2).contiguous() if part.stack.is_transposed else tensor


def to_half_split(matrix: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Reorders interleaved rotary rows to pentad's half-split order: per head all first elements of pairs, then all
    second ones. Returns `matrix` itself if `rotary` is None."""
    if rotary is None:
        return matrix
    heads = matrix.unflatten(0, (rotary.heads, -1))
    plain, rotated = heads[:, : -rotary.width], heads[:, -rotary.width :]
    return torch.cat([plain, rotated[:, 0::2], rotated[:, 1::2]], dim=1).flatten(0, 1)


def to_interleaved(matrix: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """The inverse of `to_half_split`."""
    if rotary is None:
        return matrix
    heads = matrix.unflatten(0, (rotary.heads, -1))
    first, second = heads[:, -rotary.width :].chunk(2, dim=1)
    rotated = torch.stack([first, second], dim=2).flatten(1, 2)
    return torch.cat([heads[:, : -rotary.width], rotated], dim=1).flatten(0, 1)


def fp8_block_size(config: dict[str, Any]) -> BlockSize | None:
    """The block size in a config.json; None for weights that are not quantized. Raises PentadError for other kinds."""
    given = config.get("quantization_config")
    if not given:
        return None
    match given:
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if min(rows, columns) > 0:
            return rows, columns
    method = given.get("quant_method") if isinstance(given, dict) else given
    expected = "expected null, or fp8 with a weight_block_size"
    raise PentadError(f"config.json has quantization_config with quant_method {method}: {expected}")


def scales_shape(shape: tuple[int, ...], block: BlockSize) -> tuple[int, ...]:
    """One scale per block, partial blocks included, of a matrix of this shape."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def dequantized(weight: torch.Tensor, scales: torch.Tensor, block: BlockSize) -> torch.Tensor:
    """The matrix in float32."""
    rows, columns = block
    wide, scales = weight.to(torch.float32), scales.to(torch.float32)
    for number, row in enumerate(scales):  # one row of blocks at a time: all scales expanded are a second matrix
        wide[number * rows : (number + 1) * rows] *= row.repeat_interleave(columns)[: wide.shape[1]]
    return wide


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values in 8 bits, scales) of a matrix, in blocks of FP8_BLOCK, of which those at the edges may be partial."""
    rows, columns = (-size % length for size, length in zip(weight.shape, FP8_BLOCK, strict=True))
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, columns, 0, rows))
    values, scales = quantize(padded, Recipe("block"), "weight")
    return values[: weight.shape[0], : weight.shape[1]].contiguous(), scales.contiguous()
