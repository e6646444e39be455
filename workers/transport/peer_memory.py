"""Memory of other processes' GPUs on the same host, mapped over CUDA IPC and copied by copy engines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from pentad.schedules.ir.errors import PentadError
from pentad.workers.transport.stream_flags import check_driver, handle_of

_LAZY_PEER_ACCESS = 1


class PeerMemory:
    """Tensors that ranks share by name. Each rank exports its own, which must live until all have closed, and maps
    those of its `peers`."""

    def __init__(
        self, store: dist.Store, key: str, rank: int, shared: Mapping[str, torch.Tensor], peers: Iterable[int]
    ) -> None:
        from cuda.bindings import driver

        self.driver = driver
        torch.cuda.synchronize()  # peers may read exported memory at once
        store.set(f"{key}/{rank}", json.dumps({name: self._export(tensor) for name, tensor in shared.items()}))
        self.exports = {peer: json.loads(store.get(f"{key}/{peer}")) for peer in peers}
        handles = {(peer, handle) for peer, names in self.exports.items() for handle, _ in names.values()}
        self.bases = {each: self._map(each[1]) for each in sorted(handles)}

    def read(self, peer: int, name: str, start: int, target: torch.Tensor, stream: int | None = None) -> None:
        """Fills a contiguous tensor with the elements of a peer's tensor from `start` on. `stream` is a handle; None is
        the current stream."""
        address = self._address(peer, name) + start * target.element_size()
        self._copy(target.data_ptr(), address, target, stream)

    def write(self, peer: int, name: str, offset: int, tensor: torch.Tensor) -> None:
        """On the current stream: copies a contiguous tensor into a peer's tensor, at `offset` bytes."""
        self._copy(self._address(peer, name) + offset, tensor.data_ptr(), tensor, None)

    def close(self) -> None:
        """Call after this rank's last copy is done; a second call does nothing."""
        for base in self.bases.values():
            check_driver(self.driver.cuIpcCloseMemHandle(base))
        self.bases.clear()

    def _address(self, peer: int, name: str) -> int:
        handle, offset = self.exports[peer][name]
        return self.bases[peer, handle] + int(offset)

    def _copy(self, target: int, source: int, like: torch.Tensor, stream: int | None) -> None:
        size = like.numel() * like.element_size()
        check_driver(self.driver.cuMemcpyDtoDAsync(target, source, size, handle_of(stream)))

    def _export(self, tensor: torch.Tensor) -> tuple[str, int]:
        """The handle of the allocation that contains a tensor, and the tensor's offset in it in bytes. Raises
        PentadError for memory that other processes cannot map."""
        allocation = self.driver.cuMemGetAddressRange(tensor.data_ptr())
        check_driver(allocation)
        base = int(allocation[1])
        handle = self.driver.cuIpcGetMemHandle(base)
        if int(handle[0]) != 0:
            reason = f"GPU memory of a rank cannot be shared: {handle[0]!r}"
            expected = "expected nccl, or PYTORCH_ALLOC_CONF without expandable_segments"
            raise PentadError(f"cluster.transport is peer: {expected} ({reason})")
        return bytes(handle[1].reserved).hex(), tensor.data_ptr() - base

    def _map(self, exported: str) -> int:
        handle = self.driver.CUipcMemHandle()
        handle.reserved = bytes.fromhex(exported)
        result = self.driver.cuIpcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
        check_driver(result)
        return int(result[1])
