"""float32 numbers as the bfloat16 ones nearest to them, and the 16 bits that those lack.

Master weights in this form need 2 bytes beside the bfloat16 weights that layers read, not 4 (in Apex's distributed
optimizers these bits are called parameter remainders).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

HALF = 0x8000  # of the last bit that bfloat16 keeps
NAN = 0x7FC00000
PIECE = 2**22  # elements that are written at a time, with 64 MiB of scratch memory
aten = torch.ops.aten
VIEWS = {aten.alias.default, aten.detach.default, aten.slice.Tensor, aten.split.Tensor, aten.view.default}


class SplitFloat32(Tensor):
    """A float32 tensor without memory of its own: the bits of `high` (bfloat16), with zeros behind them, plus `low`
    (int16).

    `high` is the nearest bfloat16, away from zero where two are as near: of such pairs each has one float32. Slices and
    views are of both parts. `copy_` and `zero_` write both; all other operations read the float32 numbers, in memory
    that lives as long as they do.
    """

    high: Tensor
    low: Tensor

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor) -> SplitFloat32:
        assert (high.dtype, low.dtype, high.shape) == (torch.bfloat16, torch.int16, low.shape)
        return Tensor._make_wrapper_subclass(cls, high.shape, dtype=torch.float32, device=high.device)

    def __init__(self, high: Tensor, low: Tensor) -> None:
        super().__init__()
        self.high, self.low = high, low

    def joined(self) -> Tensor:
        """The numbers, in memory of their own."""
        bits = self.high.view(torch.int16).to(torch.int32)
        return bits.bitwise_left_shift_(16).add_(self.low).view(torch.float32)

    @classmethod
    def _run(
        cls, operation: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What torch calls instead of an operation that has a SplitFloat32 among its arguments."""
        target, given = args[0], kwargs or {}
        if operation in VIEWS:
            parts = [operation(part, *args[1:], **given) for part in (target.high, target.low)]
            return cls(*parts) if isinstance(parts[0], Tensor) else list(map(cls, *parts))
        if operation is aten.zero_.default:
            target.high.zero_()
            target.low.zero_()
            return target
        rest, named = tree_map_only(cls, cls.joined, (args[1:], given))
        if operation is aten.copy_.default and isinstance(target, cls):
            _write(target, rest[0].to(target.device, torch.float32, *rest[1:], **named))
            return target
        assert not (operation._schema.is_mutable and isinstance(target, cls)), f"{operation} would write a copy"
        return operation(target.joined() if isinstance(target, cls) else target, *rest, **named)

    def _shown(self) -> str:
        return f"SplitFloat32({self.joined()})"

    __repr__: Any = _shown
    __torch_dispatch__: Any = _run
    __torch_function__: Any = torch._C._disabled_torch_function_impl


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype; bfloat16 as `high` of a SplitFloat32, where torch would round to even."""
    if dtype != torch.bfloat16 or x.dtype != torch.float32:
        return x.to(dtype)
    return _high(_bits(x))


def _write(target: SplitFloat32, x: Tensor) -> None:
    pieces = (each.reshape(-1).split(PIECE) for each in (target.high, target.low, x.expand(target.shape)))
    for high, low, values in zip(*pieces, strict=True):
        bits = _bits(values)
        high.copy_(_high(bits))
        low.copy_(bits.sub_(high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)))


def _bits(x: Tensor) -> Tensor:
    """Of float32, with the same for all NaNs, to which HALF can be added without overflow."""
    return torch.where(x.isnan(), NAN, x.view(torch.int32))


def _high(bits: Tensor) -> Tensor:
    return (bits + HALF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
