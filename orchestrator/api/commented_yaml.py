"""A configuration as YAML in which a comment explains every key, in the words of docs/configuration.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.config.errors import sections_of
from pentad.orchestrator.config.yaml_text import dump_yaml

_WIDTH = 120


def commented_yaml(values: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections with a line for each key; a comment goes above its key if it does not fit beside it."""
    return "\n\n".join("\n".join(_section(name, section, "")) for name, section in values.items()) + "\n"


def _section(path: str, values: Mapping[str, Any], indent: str) -> Iterator[str]:
    schema, inner = sections_of(RunConfig)[path], indent + "  "
    yield from _comment(schema["description"], indent)
    yield f"{indent}{path.rpartition('.')[2]}:"
    lines = {key: f"{inner}{_line(key, value)}" for key, value in values.items() if not isinstance(value, Mapping)}
    meanings = {key: " ".join(schema["properties"][key]["description"].split()) for key in values}
    column = 2 + max(map(len, lines.values()), default=0)
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _section(f"{path}.{key}", value, inner)
        elif column + len(meanings[key]) + 2 <= _WIDTH:
            yield f"{lines[key]:<{column}}# {meanings[key]}"
        else:
            yield from _comment(meanings[key], inner)
            yield lines[key]


def _line(key: str, value: Any) -> str:
    text = dump_yaml({key: value}).rstrip("\n")
    return text[1:-1] if text.startswith("{") else text  # a mapping of scalars is written on one line


def _comment(text: str, indent: str) -> list[str]:
    prefix, words = f"{indent}# ", " ".join(text.split())
    return textwrap.wrap(
        words,
        _WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_on_hyphens=False,  # as in file names
    )
