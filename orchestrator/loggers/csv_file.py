"""metrics.csv in the run's folder: a row per step, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from pentad.orchestrator.loggers.logger import LoggedRun, Logger, Note

FILE = "metrics.csv"


class CsvFile(Logger):
    """Writes a column for each value, with an empty field where a step has none."""

    def __init__(self, run: LoggedRun, note: Note) -> None:
        self.path, self.columns = Path(run.folder, FILE), ["step", "time"]
        self.rewind(run.first)

    def log(self, step: int, time: float, values: dict[str, float]) -> None:
        if new := [name for name in values if name not in self.columns]:
            self.columns += new
            self._rewrite(self._rows())
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow({"step": step, "time": time, **values})

    def rewind(self, step: int) -> None:
        rows = self._rows()
        self.columns = list(rows[0]) if rows else self.columns
        self._rewrite([row for row in rows if int(row["step"]) < step])

    def _rows(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row.values()]  # a crash may cut the last row

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        partial = self.path.with_name(f".{FILE}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, self.path)
