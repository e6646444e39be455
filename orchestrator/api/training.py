"""`pentad.train` and `pentad train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from pentad.orchestrator.api.configs import Config, config_to_train
from pentad.orchestrator.api.rendering import log_console
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.memory.choice import with_choices
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.runfolder import with_kept_division
from pentad.orchestrator.planning.fit import device_of
from pentad.orchestrator.run.interrupts import OnStep
from pentad.schedules.ir.argument_types import checks_types

if TYPE_CHECKING:
    from pentad.orchestrator.api.runs import Run


@checks_types
def train(config: Config = None, *, on_step: OnStep | None = None, quiet: bool = False, **sections: Any) -> Run:
    """Runs the steps that a run still lacks, and returns the run.

    `config` is a YAML file's path, a mapping of sections or a RunConfig (None: the quickstart); keywords are sections
    that are merged into it, such as `mesh={"pp": 2}`. With `quiet` nothing is printed.

    `on_step` is called after each step with its row of metrics.jsonl, in this thread; a step that is replayed after a
    failure is reported again. Its result is ignored. If it raises StopTraining, the run stops with a checkpoint after
    the steps in flight (about two seconds of them). Any other exception stops it in the same way and is then raised
    here.

    Ctrl-C, SIGTERM and SIGHUP stop the run in the same way, if this is the main thread; a second one raises
    KeyboardInterrupt. Raises PentadError for a mistake in the configuration, before anything is started or written; if
    this process is already connected to a Ray cluster; and if ranks fail.
    """
    from pentad.orchestrator.api.runs import Run

    resolved, note = config_to_train(config, sections=sections)
    return Run(run_displayed(resolved, log_console(quiet=quiet), note, on_step=on_step)["folder"])


def run_displayed(
    config: RunConfig, console: Console, note: str = "", *, began: float | None = None, on_step: OnStep | None = None
) -> dict[str, Any]:
    """Trains, displays progress on the console with `note` above it, and returns the run's summary. The start-up is
    timed from `began`, in monotonic seconds."""
    with Display(console, config.run.name, config.run.steps, began) as display:
        if note:
            display.note(note)
        display.phase("checking the data and planning")
        config = with_choices(with_kept_division(config), *device_of(config))
        from pentad.orchestrator.run.train import prepare
        from pentad.orchestrator.run.train import train as run

        return run(config, display=display, plan=prepare(config), on_step=on_step)
