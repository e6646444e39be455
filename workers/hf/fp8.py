"""Weights in eight bits with a factor a block, as DeepSeek-V3 was released: read, never written."""

from __future__ import annotations

from typing import Any

import torch

from pentad.schedules.ir.errors import PentadError

DTYPE = "F8_E4M3"
SUFFIX = "_scale_inv"  # behind a weight's name: the factors' name

Blocks = tuple[int, int]  # rows and columns


def blocks_of(config: dict[str, Any]) -> Blocks | None:
    """The blocks that config.json says; None for weights that are not quantized. PentadError for any other kind."""
    given = config.get("quantization_config")
    if not given:
        return None
    match given:
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if min(rows, columns) > 0:
            return rows, columns
    method = given.get("quant_method") if isinstance(given, dict) else given
    expected = "expected none, or fp8 with a weight_block_size"
    raise PentadError(f"config.json has quantization_config of quant_method {method}, {expected}")


def factors_shape(shape: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    """One for each block that a matrix of `shape` touches."""
    return tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))


def scaled(weight: torch.Tensor, factors: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The matrix in float32."""
    rows, columns = blocks
    wide, factors = weight.to(torch.float32), factors.to(torch.float32)
    for number, row in enumerate(factors):  # a row of blocks at a time: all factors spread out are a second matrix
        wide[number * rows : (number + 1) * rows] *= row.repeat_interleave(columns)[: wide.shape[1]]
    return wide
