"""The kinds of values that lines of metrics.jsonl, eval.jsonl and journal.jsonl may hold, whoever wrote them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from pentad.schedules.ir.errors import PentadError, printable


class Kind(NamedTuple):
    """The values that a field may have."""

    expected: str
    holds: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))


def _is_measured(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_by_source(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, dict) and _is_measured(each.get("loss", "")) and _is_number(each.get("target_tokens"))
        for each in value.values()
    )


def _is_fp8(value: Any) -> bool:
    """Whether the value is as `orchestrator.records.fp8_health.fp8_row` writes it."""
    operands = value.values() if isinstance(value, dict) else (None,)
    return all(
        isinstance(sample, dict)
        and _is_measured(sample.get("amax", ""))
        and all(_is_number(sample.get(share)) for share in ("saturated", "underflowed"))
        for each in operands
        for sample in (each.values() if isinstance(each, dict) else (None,))
    )


def _is_gpus(value: Any) -> bool:
    """Whether the value is as `orchestrator.records.gpu_clocks.row_of` writes it."""
    measured = ("clock_hertz", "clock_most_hertz", "power_watts")
    return (
        isinstance(value, dict)
        and {*value} == {"count", *measured, "throttled"}
        and all(_is_number(value[name]) and value[name] > 0 for name in ("count", *measured))
        and isinstance(value["throttled"], dict)
        and all(map(_is_count, value["throttled"].values()))
    )


def _is_cosines(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_measured, value.values()))


def _is_ranges(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 2 and all(map(_is_count, each)) for each in value
    )


_COUNT, _TEXT = Kind("a count", _is_count), Kind("text", lambda value: isinstance(value, str))
_MEASURED = Kind("a finite number or null", _is_measured)
_KINDS = {  # by name of the field, in whatever file
    # -1: a rank before its first step
    "step": Kind("a count, or -1", lambda value: type(value) is int and -1 <= value < 2**63),
    **dict.fromkeys(("generation", "batch", "samples"), _COUNT),
    **dict.fromkeys(("tokens", "total_tokens", "target_tokens", "sequences"), Kind("a finite number", _is_number)),
    **dict.fromkeys(("event", "error", "cause", "data", "yaml", "manifest"), _TEXT),
    **dict.fromkeys(("loss", "perplexity", "grad_norm", "lr", "mfu", "bubble_planned", "bubble_measured"), _MEASURED),
    **dict.fromkeys(("step_seconds", "tokens_per_second"), _MEASURED),
    "time": Kind("Unix seconds", lambda value: _is_number(value) and 0 <= value < 1e11),
    "sources": Kind("loss and target_tokens by name", _is_by_source),
    "gpus": Kind("count, clocks, power and throttled GPUs by reason", _is_gpus),
    "fp8": Kind("amax, saturated and underflowed by parameter and operand", _is_fp8),
    "fp8_gradients": Kind("a cosine or null by parameter", _is_cosines),
    "skipped_batches": Kind("pairs of counts", _is_ranges),
}


def checked_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row, with its text made safe for a terminal. Raises PentadError for a field of another kind than pentad
    writes."""
    for name, kind in _KINDS.items():
        if name in row and not kind.holds(row[name]):
            found = printable(repr(row[name])[:60])
            raise PentadError(f"{where} has {name} = {found}: expected {kind.expected}: repair or remove the line")
    return {printable(name): printable(value) if isinstance(value, str) else value for name, value in row.items()}
