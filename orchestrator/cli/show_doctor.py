"""`pentad doctor`: a line for each check as soon as it is made, with the remedy below it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.doctor.examine import NAMES, examine
from pentad.orchestrator.doctor.finding import FindingRow, Verdict, worst
from pentad.orchestrator.planning.formatting import counted, format_duration
from pentad.schedules.ir.errors import printable

_COLOURS: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "failure": "bold red", "not applicable": "dim"}
_NAME, _VERDICT = max(map(len, NAMES)), len("failure")
_LONG = 1.0  # seconds, for a check that gets a clock


def show_doctor(config: RunConfig, burn: float | None, console: Console, *, as_json: bool) -> int:
    """Runs all checks and prints them. Returns the exit status: 1 if a check failed."""
    rows: list[FindingRow] = []
    for found in examine(config, burn, _under_way):
        rows += found
        for row in () if as_json else merged(found):
            show_row(row, console)
    verdicts = [row.finding.verdict for row in rows]
    if as_json:
        print(json.dumps({"verdict": worst(verdicts), "checks": list(map(_facts, rows))}))
    else:
        _show_left_out(rows, console)
        counts = Counter(verdicts)
        texts = [counted(counts[each], each) for each in ("failure", "warning") if counts[each]]
        console.print(Text(f"\n {' and '.join(texts) or 'nothing wrong'}", _COLOURS[worst(verdicts)]))
    return int("failure" in verdicts)


def merged(rows: Sequence[FindingRow]) -> list[FindingRow]:
    """For each check that applies, one row for all nodes where it is ok, and one for each other node."""
    fine = [row for row in rows if row.finding.verdict == "ok"]
    found = [row for row in rows if row.finding.verdict in ("warning", "failure")]
    if not fine:
        return found
    is_same = len({row.finding.text for row in fine}) == 1
    node = fine[0].node if len(fine) == 1 else f"{len(fine)} nodes" + ("" if is_same else f", e.g. {fine[0].node}")
    return [fine[0]._replace(node=node), *found]


def show_row(row: FindingRow, console: Console) -> None:
    """Prints name, verdict and sentence, and the remedy below; wraps lines only on a terminal."""
    finding, where = row.finding, f"{row.node}: " if row.node else ""
    lines = [
        (
            Text(row.check, "dim"),
            Text(finding.verdict, _COLOURS[finding.verdict]),
            Text(where + printable(finding.text)),
        )
    ]
    if finding.remedy:
        lines.append((Text(), Text(), Text(f"> {printable(finding.remedy)}", "italic")))
    _print(lines, console)


def _show_left_out(rows: Sequence[FindingRow], console: Console) -> None:
    """Prints the checks that apply nowhere, by reason."""
    reasons = defaultdict(list)
    for name in dict.fromkeys(row.check for row in rows):
        findings = [row.finding for row in rows if row.check == name]
        if all(each.verdict == "not applicable" for each in findings):
            reasons[findings[0].text].append(name)
    _print(
        [(Text(), Text("-", "dim"), Text(f"{', '.join(its)}: {why}", "dim")) for why, its in reasons.items()], console
    )


def _print(lines: Sequence[tuple[Text, Text, Text]], console: Console) -> None:
    if not console.is_terminal:
        for name, verdict, text in lines:
            console.print(Text(f" {name!s:<{_NAME}}  {verdict!s:<{_VERDICT}}  {text}"), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 1), pad_edge=True)
    table.add_column(min_width=_NAME, no_wrap=True)
    table.add_column(min_width=_VERDICT, no_wrap=True)
    table.add_column(overflow="fold")
    for cells in lines:
        table.add_row(*cells)
    console.print(table)


@contextmanager
def _under_way(name: str, seconds: float) -> Iterator[None]:
    """Shows a clock on stderr during a long check, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(" {task.description}"), TimeElapsedColumn())
    disable = seconds < _LONG or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        progress.add_task(f"{name}, about {format_duration(seconds)}", total=None)
        yield


def _facts(row: FindingRow) -> dict[str, object]:
    finding = row.finding._asdict() | {"figures": dict(row.finding.figures)}
    return {"check": row.check, **({"node": row.node} if row.node else {}), **finding}
