"""The eval section of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, field_validator

from pentad.orchestrator.config.errors import Broken
from pentad.orchestrator.config.sections import Count, Section, Text


class EvalDataSection(Section):
    """A data set to evaluate on."""

    name: Text = Field(description="what tables, metrics and checkpoint.keep_best call it")
    path: Text = Field(description="folder that `pentad data build` wrote, or builtin:pydoc")


class EvalSection(Section):
    """Evaluation on data that is not trained on ([evaluation](evaluation.md)), if there is any: data.holdout or
    eval.data."""

    data: list[EvalDataSection] | None = None
    """a corpus, or a list of {name, path}; evaluated besides what data.holdout holds out, which is called holdout"""
    every: NonNegativeInt = 0
    """steps between evaluations; 0: only after the last step of the run"""
    at_start: bool = False
    """evaluate before the first step too"""
    sequences: Count | None = 256
    """sequences of each data set, the first ones in its own order; null: all"""

    @field_validator("data", mode="before")
    @classmethod
    def _name_single_path(cls, value: Any) -> Any:
        """A corpus alone is called as its folder."""
        if isinstance(value, str) and value:
            return [{"name": Path(value.removeprefix("builtin:")).name or value, "path": value}]
        return value

    def next_due(self, first: int, steps: int) -> int | None:
        """After how many of the run's `steps` steps the next evaluation is due, `first` at the earliest; None if no
        other is."""
        if first > steps:
            return None
        if first <= 0 and self.at_start:
            return 0
        return min(steps, -(-max(1, first) // self.every) * self.every) if self.every else steps

    def count(self, steps: int) -> int:
        """The evaluations of a run of so many steps."""
        return self.at_start + (-(-steps // self.every) if self.every else 1)

    def rules(self) -> Iterator[Broken | str]:
        names = [each.name for each in self.data or ()]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Broken("data", "different names", f"a list with the name {name} twice")
