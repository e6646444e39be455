"""What the slices of a sequence share: keys and values on the way forward, gradients of these on the way back."""

from __future__ import annotations

import torch

from pentad.kernels.backend import accumulator

Pair = tuple[torch.Tensor, torch.Tensor]  # of keys and of values, each [B, M, positions, D]


class SlicedKVCache:
    """One layer's keys and values of one microbatch, whose slices come in order and go back in reverse.

    `length` is that of a whole sequence. Gradients of earlier positions are kept in float32 or wider until their own
    slice's turn: every later slice adds to them, the last one first.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.room: Pair | None = None
        self.gradients: Pair | None = None  # of the positions before the slice that went back last

    def extended(self, own: Pair, start: int) -> Pair:
        """Keys and values up to the end of the slice that begins at position `start`, whose own ones are given."""
        count = own[0].shape[2]
        if count == self.length:
            return own  # the only slice stays where it is
        if self.room is None:
            keys, values = (each.new_empty(*each.shape[:2], self.length, each.shape[3]) for each in own)
            self.room = keys, values
        end = start + count
        for room, new in zip(self.room, own, strict=True):
            # `data`: graphs of earlier slices watch for changes of what they have read, and these are none
            room.data[:, :, start:end] = new
        return self.room[0][:, :, :end], self.room[1][:, :, :end]

    def own(self, gradients: Pair, start: int) -> Pair:
        """Gradients of a slice's own keys and values: what it gives to all up to its end is given, what later slices
        gave is here."""
        dtype = gradients[0].dtype
        if self.gradients is not None:
            keys, values = self.gradients
            gradients = keys.add_(gradients[0]), values.add_(gradients[1])
        keys, values = gradients
        if start:
            wide = accumulator(dtype)
            self.gradients = keys[:, :, :start].to(wide), values[:, :, :start].to(wide)
            keys, values = keys[:, :, start:], values[:, :, start:]
        return keys.to(dtype), values.to(dtype)
