"""float32 numbers split into the nearest bfloat16 numbers and the 16 bits that those lack.

Master weights in this form need 2 bytes beside the bfloat16 weights that layers read, not 4: only their remainders are
stored (`store_param_remainders` of Megatron-LM and Transformer Engine).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pentad.kernels.backend import triton_on_gpu

HALF = 0x8000  # of the last bit that bfloat16 keeps
NAN = 0x7FC00000
PIECE = 2**22  # elements that are written at a time, with 64 MiB of scratch memory
aten = torch.ops.aten
VIEWS = {
    *(aten.alias.default, aten.detach.default, aten.slice.Tensor, aten.view.default),
    *(aten.split.Tensor, aten.split_with_sizes.default),
}


class SplitFloat32(Tensor):
    """A float32 tensor without memory of its own: the bits of `high` (bfloat16), with zeros behind them, plus
    `low` (int16).

    `high` is the nearest bfloat16, with ties away from zero, so each float32 has exactly one such pair. Slices and
    views are of both parts. `copy_` and `zero_` write both. All other operations, and `view` in another dtype, read the
    float32 numbers from temporary memory; other views and writes are refused.
    """

    high: Tensor
    low: Tensor

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor) -> SplitFloat32:
        assert (high.dtype, low.dtype, high.shape) == (torch.bfloat16, torch.int16, low.shape)
        layout: dict[str, Any] = {"strides": high.stride(), "device": high.device}
        return Tensor._make_wrapper_subclass(cls, high.shape, dtype=torch.float32, **layout)

    def __init__(self, high: Tensor, low: Tensor) -> None:
        super().__init__()
        self.high, self.low = high, low

    @classmethod
    def of(cls, x: Tensor) -> SplitFloat32:
        """The numbers of a float32 tensor."""
        found = cls(torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16))
        found.copy_(x)
        return found

    def joined(self) -> Tensor:
        """The numbers, in memory of their own."""
        return join(self.high, self.low)

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
        if operation is aten.copy_.default and isinstance(target, cls):
            _write(target, args[1])
            return target
        is_of_memory = any(each.alias_info is not None for each in operation._schema.returns)
        if isinstance(target, cls) and is_of_memory and operation is not aten.view.dtype:
            raise TypeError(f"{operation} of a SplitFloat32 would be of a copy: expected what reads it")
        return operation(*tree_map_only(cls, cls.joined, tuple(args)), **tree_map_only(cls, cls.joined, given))

    def _shown(self) -> str:
        return f"SplitFloat32({self.joined()})"

    __repr__: Any = _shown
    __torch_dispatch__: Any = _run
    __torch_function__: Any = torch._C._disabled_torch_function_impl


@triton_on_gpu
def join(high: Tensor, low: Tensor) -> Tensor:
    """The float32 numbers [..] of a SplitFloat32."""
    bits = high.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(low).view(torch.float32)


@triton_on_gpu
def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype; from float32 to bfloat16, the `high` of a SplitFloat32, where torch would round ties to
    even."""
    return _high(_bits(x)) if (x.dtype, dtype) == (torch.float32, torch.bfloat16) else x.to(dtype)


def _write(target: SplitFloat32, x: Tensor) -> None:
    flat = target.high.view(-1), target.low.view(-1), x.expand(target.shape).reshape(-1)
    for high, low, values in zip(*(each.split(PIECE) for each in flat), strict=True):
        bits = _bits((values.joined() if isinstance(values, SplitFloat32) else values).to(high.device, torch.float32))
        high.copy_(_high(bits))
        low.copy_(bits.sub_(high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)))


def _bits(x: Tensor) -> Tensor:
    """The bits of float32 numbers; those of all NaNs are the same, so that HALF can be added without overflow."""
    return torch.where(x.isnan(), NAN, x.view(torch.int32))


def _high(bits: Tensor) -> Tensor:
    return (bits + HALF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
