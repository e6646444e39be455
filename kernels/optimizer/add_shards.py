"""The sum of a shard of gradients over the ranks that hold it, from copies of their parts."""

from torch import Tensor

from pentad.kernels.backend import triton_on_gpu


@triton_on_gpu
def add_shards_(out: Tensor, own: Tensor, others: Tensor, position: int, *, accumulate: bool) -> None:
    """out [n] = the sum of own [n] and of the rows of others [ranks - 1, n] in the order of ranks, of which own is
    number `position`; after what `out` holds if it is to `accumulate`. `out` may be `own`."""
    terms = [*others[:position], own, *others[position:]]
    total = out + terms[0] if accumulate else terms[0]
    for term in terms[1:]:
        total = total + term
    out.copy_(total)
