"""Memory of one process's GPU in the address space of another process on the same host (CUDA IPC)."""

from __future__ import annotations

import torch

from pentad.workers.transport.stream_flags import checked

_HANDLE = 64  # bytes
_LAZY_PEER_ACCESS = 1


def offer(tensor: torch.Tensor) -> bytes:
    """What another process needs to open a tensor's memory, as long as the tensor lives."""
    from cuda.bindings import driver

    result = driver.cuMemGetAddressRange(tensor.data_ptr())
    checked(result)
    base = int(result[1])
    found = driver.cuIpcGetMemHandle(base)
    checked(found)
    return bytes(found[1].reserved) + (tensor.data_ptr() - base).to_bytes(8, "little")


class Opened:
    """The memory that another process offers; `at` is its address here. Close it after the last copy."""

    def __init__(self, offered: bytes) -> None:
        from cuda.bindings import driver

        self.driver, handle = driver, driver.CUipcMemHandle()
        handle.reserved = offered[:_HANDLE]
        result = driver.cuIpcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
        checked(result)
        self.base = int(result[1])
        self.at = self.base + int.from_bytes(offered[_HANDLE:], "little")

    def fill(self, offset: int, tensor: torch.Tensor) -> None:
        """Copies a contiguous tensor to `offset` bytes behind the start, on the current stream."""
        stream, size = torch.cuda.current_stream().cuda_stream, tensor.numel() * tensor.element_size()
        checked(self.driver.cuMemcpyDtoDAsync(self.at + offset, tensor.data_ptr(), size, stream))

    def close(self) -> None:
        checked(self.driver.cuIpcCloseMemHandle(self.base))
