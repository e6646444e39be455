"""Main gradients that W has not written yet: the first product of a sum overwrites them, so nothing zeroes them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

Place = tuple[int, int]  # address and number of elements


class Unwritten:
    """Tensors whose contents mean nothing until they are taken."""

    def __init__(self) -> None:
        self.tensors: dict[Place, Tensor] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        self.tensors.update((_place(tensor), tensor) for tensor in tensors)

    def take(self, tensor: Tensor) -> bool:
        """Whether this tensor, or this view of all of it, is to be overwritten; from now on it is written."""
        return self.tensors.pop(_place(tensor), None) is not None

    def take_all(self) -> list[Tensor]:
        """The tensors that are left: nothing was added to them."""
        found, self.tensors = list(self.tensors.values()), {}
        return found


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.numel()
