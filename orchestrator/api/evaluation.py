"""`pentad.evaluate`: the loss of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pentad.orchestrator.api.checkpoints import Source, checkpoint_of
from pentad.orchestrator.api.configs import load_config
from pentad.orchestrator.api.rendering import log_console
from pentad.orchestrator.monitoring.display import Display
from pentad.schedules.ir.argument_types import checks_types


@checks_types
def evaluate(
    source: Source,
    *,
    data: str | Sequence[str] = (),
    sequences: int | None = None,
    quiet: bool = False,
    **sections: Any,
) -> list[dict[str, Any]]:
    """The loss of a checkpoint on each data set, as `pentad eval` prints it: rows with the keys of eval.jsonl.

    `source` is a checkpoint's folder, or a run or an import, whose newest checkpoint is taken. `data` are corpora, as
    PATH or NAME=PATH (none: those of the run), and `sequences` is how many of their sequences to read (None: as in the
    run). Keywords are sections merged into the run's configuration, such as `mesh={"pp": 1}`. Changes no file.

    Raises PentadError for a mistake, and if this process is already connected to a Ray cluster.
    """
    from pentad.orchestrator.run.evaluate import eval_config
    from pentad.orchestrator.run.evaluate import evaluate as run

    checkpoint = checkpoint_of(source)
    found = eval_config(checkpoint, [data] if isinstance(data, str) else data, sequences, ())
    config = load_config(found, **sections)
    with Display(log_console(quiet=quiet), config.run.name, config.run.steps) as display:
        return run(config, checkpoint, display)
