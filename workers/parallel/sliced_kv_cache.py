"""What the slices of a sequence share: keys and values in forward order, their gradients in backward order."""

from __future__ import annotations

from torch import Tensor

from pentad.kernels.backend import accumulation_dtype

KeysValues = tuple[Tensor, Tensor]  # each [B, M, positions, D]; or their gradients


class SlicedKVCache:
    """The keys and values of one layer and microbatch, for sequences of `length` tokens cut into slices.

    Slices go forward in order and backward in reverse. Every later slice adds to the gradients of earlier ones, which
    are summed in float32 or wider until their own backward runs.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.buffer: KeysValues | None = None
        self.gradients: KeysValues | None = None  # of positions before the slice whose backward ran last

    def extend(self, own: KeysValues, start: int) -> KeysValues:
        """All keys and values up to the end of the slice that starts at position `start`, given its own."""
        size = own[0].shape[2]
        if size == self.length:
            return own  # a single slice needs no copy
        if self.buffer is None:
            keys, values = (x.new_empty(*x.shape[:2], self.length, x.shape[3]) for x in own)
            self.buffer = keys, values
        end = start + size
        for buffer, new in zip(self.buffer, own, strict=True):
            # `data`: graphs of earlier slices read other positions, so autograd need not see this as a change.
            buffer.data[:, :, start:end] = new
        return self.buffer[0][:, :, :end], self.buffer[1][:, :, :end]

    def slice_grads(self, gradients: KeysValues, start: int) -> KeysValues:
        """The gradients of a slice's own keys and values, given its gradients of all positions up to its end.

        Adds what later slices contributed and keeps the part of earlier slices.
        """
        dtype = gradients[0].dtype
        if self.gradients is not None:
            keys, values = self.gradients
            gradients = keys.add_(gradients[0]), values.add_(gradients[1])
        keys, values = gradients
        if start:
            wide = accumulation_dtype(dtype)
            self.gradients = keys[:, :, :start].to(wide), values[:, :, :start].to(wide)
            keys, values = keys[:, :, start:], values[:, :, start:]
        return keys.to(dtype), values.to(dtype)
