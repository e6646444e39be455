"""The checkpoint with the frozen weights that adapters belong to."""

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.lora import LoraBase
from pentad.workers.checkpoint.checkpoint import Checkpoint, fingerprint, open_checkpoint
from pentad.workers.checkpoint.location import location


def open_base(base: LoraBase) -> Checkpoint:
    """Reads and verifies the checkpoint. Raises PentadError if it is gone, damaged, or not the one that the adapters
    began with."""
    folder = location(base.folder)
    try:
        checkpoint, found = open_checkpoint(folder), fingerprint(folder)
    except PentadError as error:
        raise PentadError(f"the frozen weights of lora cannot be read: {error}") from error.__cause__
    if found != base.fingerprint:
        expected = f"that with sha256 {base.fingerprint} of its manifest, which the adapters were trained with"
        raise PentadError(f"the checkpoint in {folder} has changed since the run began: expected {expected}")
    return checkpoint
