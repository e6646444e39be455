"""The page of a sweep, from its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pentad.orchestrator.sweep.results import OUTCOMES, TrialRow, best_first
from pentad.schedules.draw.sweep import sweep_page


def page_of(rows: Sequence[TrialRow], title: str) -> str:
    """The page as HTML: the best trial of each model by number of GPUs, and all trials by their settings."""
    counts, best = Counter(row.outcome for row in rows), best_first(rows)
    facts = {"trials": str(len(rows))} | {
        TEXTS[outcome]: str(counts[outcome]) for outcome in OUTCOMES if counts[outcome]
    }
    if best:
        facts["most tokens/s"] = f"{best[0].layout}: {best[0].tokens_per_second:,.0f}"
    return sweep_page([row._asdict() for row in rows], title=title, facts=facts)


TEXTS = {
    "measured": "measured",
    "pruned": "pruned",
    "memory": "out of memory",
    "deadline": "over the deadline",
    "hang": "hung",
    "failed": "failed",
}
