"""How weights in files differ from pentad's: the row order of rotary parts, stacked experts, and quantized blocks.

8-bit weights are FP8 E4M3 with one scale per block, as DeepSeek-V3 was released. 4-bit weights are MXFP4, as gpt-oss's
experts were released (OCP Microscaling Formats 1.0, section 5): FP4 E2M1, two to a byte, with a power of two as the
scale of every 32 weights of an output.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import torch

from pentad.kernels.fp8.fp8_tensor import TILE, Recipe, quantize
from pentad.schedules.ir.errors import PentadError
from pentad.workers.hf.names import FileTensor, Rotary

FP8_BLOCK = (TILE, TILE)  # block size of what is written
FP8_DTYPE = "F8_E4M3"  # as named in safetensors
SCALE_SUFFIX = "_scale_inv"  # appended to a weight's name for its scales

MXFP4: Final = "mxfp4"
PACKED_SUFFIX, EXPONENT_SUFFIX = "_blocks", "_scales"  # of the two tensors that store an MXFP4 weight
_PACKED, _EXPONENT_BIAS = 32, 127  # how many weights share an exponent, and its bias
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

BlockSize = tuple[int, int]  # rows and columns
Quantization = BlockSize | Literal["mxfp4"]


def from_file(tensor: torch.Tensor, part: FileTensor) -> torch.Tensor:
    """Converts a tensor from its form in files to pentad's."""
    if part.stack is None:
        return to_half_split(tensor, part.rotary)
    if part.stack.is_transposed:
        tensor = tensor.transpose(1, 2)
    return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1) if part.stack.alternates else tensor.contiguous()


def to_file(tensor: torch.Tensor, part: FileTensor) -> torch.Tensor:
    """The inverse of `from_file`; `tensor` has the right elements but may have any shape."""
    if part.stack is None:
        return to_interleaved(tensor.view(part.shape), part.rotary)
    experts, *rows = part.shape
    tensor = tensor.view(experts, *(reversed(rows) if part.stack.is_transposed else rows))
    if part.stack.alternates:
        tensor = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)
    return tensor.transpose(1, 2).contiguous() if part.stack.is_transposed else tensor


def to_half_split(matrix: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Reorders interleaved rotary rows to pentad's half-split order: in each head, all first elements of pairs, then
    all second ones. Returns `matrix` itself if `rotary` is None."""
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


def quantization_of(config: dict[str, Any]) -> Quantization | None:
    """The quantization in a config.json: the block size of FP8, or MXFP4; None for unquantized weights. Raises
    PentadError for other kinds."""
    given = config.get("quantization_config")
    if not given:
        return None
    match given:
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if min(rows, columns) > 0:
            return rows, columns
        case {"quant_method": "mxfp4"}:
            return MXFP4
    method = given.get("quant_method") if isinstance(given, dict) else given
    expected = "expected null, fp8 with a weight_block_size, or mxfp4"
    raise PentadError(f"config.json has quantization_config with quant_method {method}: {expected}")


def scales_shape(shape: tuple[int, ...], block: BlockSize) -> tuple[int, ...]:
    """The shape of the scales of a matrix: one per block, including partial blocks."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def dequantized(weight: torch.Tensor, scales: torch.Tensor, block: BlockSize) -> torch.Tensor:
    """The matrix in float32, given its FP8 values and the scales of its blocks."""
    rows, columns = block
    wide, scales = weight.to(torch.float32), scales.to(torch.float32)
    for number, row in enumerate(scales):  # by rows of blocks: expanding all scales at once takes a second matrix
        wide[number * rows : (number + 1) * rows] *= row.repeat_interleave(columns)[: wide.shape[1]]
    return wide


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(FP8 values, scales) of a matrix, in blocks of FP8_BLOCK, which may be partial at the edges."""
    rows, columns = (-size % length for size, length in zip(weight.shape, FP8_BLOCK, strict=True))
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, columns, 0, rows))
    values, scales = quantize(padded, Recipe("block"), "weight")
    return values[: weight.shape[0], : weight.shape[1]].contiguous(), scales.contiguous()


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the MXFP4 (bytes, exponents) of stacked matrices [experts, inputs, outputs]. Raises PentadError for
    partial blocks."""
    experts, inputs, outputs = shape
    if inputs % _PACKED:
        raise PentadError(f"config.json has quant_method mxfp4 for {inputs} inputs: expected a multiple of {_PACKED}")
    return (experts, outputs, inputs // _PACKED, _PACKED // 2), (experts, outputs, inputs // _PACKED)


def unpacked(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The MXFP4 matrices in float32, [experts, inputs, outputs]; the lower four bits of a byte are the first weight."""
    experts, outputs, groups, _ = values.shape
    wide = torch.empty(experts, groups * _PACKED, outputs)
    table = torch.cat((_FP4, -_FP4))
    for matrix, packed, powers in zip(wide, values, exponents, strict=True):  # one at a time: indices take 8 bytes each
        pairs = table[torch.stack((packed & 0xF, packed >> 4), dim=-1).long()].flatten(-2)
        scaled = torch.ldexp(pairs, powers.to(torch.int32).sub_(_EXPONENT_BIAS).unsqueeze(-1))
        matrix.copy_(scaled.flatten(1).t())
    return wide
