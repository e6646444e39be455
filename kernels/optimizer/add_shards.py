"""The sum of a shard of gradients, or of rows of partial results, over ranks, from copies of their terms."""

import torch
from torch import Tensor

from pentad.kernels.backend import DenseRows, triton_on_gpu


@triton_on_gpu
def add_shards_(out: Tensor, own: Tensor, others: DenseRows, position: int, *, accumulate: bool) -> None:
    """Writes to out [n] the sum, in the order of ranks, of own [n], which is that of rank number `position`, and the
    rows of others [ranks - 1, n]; with `accumulate`, the sum begins with what `out` holds. `out` may be `own`. Terms
    narrower than float32 are added in float32."""
    terms = [
        each.to(torch.promote_types(each.dtype, torch.float32))
        for each in (*others[:position], own, *others[position:])
    ]
    total = out + terms[0] if accumulate else terms[0]
    for term in terms[1:]:
        total = total + term
    out.copy_(total)
