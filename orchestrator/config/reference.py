"""The configuration reference: `configuration_page` returns docs/configuration.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.config.errors import sections_of, shown
from pentad.orchestrator.config.sections import MOST
from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.search.auto import AUTO

INTRODUCTION = """\
# Configuration

A configuration is a YAML file of sections. Overrides on the command line have the same keys, dotted:
`pentad train run.yaml mesh.dp=2 optimizer.learning_rate=1e-4`. Without a file, `pentad` takes the quickstart's.

Scalars are those of YAML 1.2: `1e-4` is a number, and `on`, `no` and dates are text. An unknown key is an error that
names the nearest known one. All errors are reported, one sentence a line, before anything starts.

A file can include others, with paths relative to itself: `include: base.yaml`, or `include: [model.yaml, data.yaml]`.
Its own keys replace those that it includes, and later files replace earlier ones, key by key. The `config.yaml` of a
run holds all keys and includes nothing.
"""
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
LIMITS = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most", "exclusiveMaximum": "less than"}


def configuration_page() -> str:
    """Markdown with a heading for each section and a row for each key."""
    parts = [INTRODUCTION]
    for path, schema in sections_of(RunConfig).items():
        if path:
            parts += _section(path, schema)
    return "\n".join(parts)


def completion_keys() -> str:
    """Every key with its values if they are few, else with its default, for shell completion (config/keys.txt)."""
    lines = []
    for path, schema in sections_of(RunConfig).items():
        for name, field in schema["properties"].items() if path and "[]" not in path else ():
            if not any("$ref" in kind for kind in (field, *field.get("anyOf", ()))):
                default = [] if name in schema.get("required", ()) else [shown(field.get("default")).strip("'")]
                values = [*CATALOGUE, AUTO] if (path, name) == ("schedule", "name") else _choices(field) or default
                lines.append(" ".join([f"{path}.{name}", *(value for value in values if " " not in value)]))
    return "\n".join(lines) + "\n"


def _choices(schema: dict[str, Any]) -> list[str]:
    """The values of a key that has only a few."""
    match schema:
        case {"enum": values}:
            return list(values)
        case {"type": "boolean"}:
            return ["false", "true"]
        case {"type": "null"}:
            return ["null"]
    found = [_choices(kind) for kind in schema.get("anyOf", ()) if kind.get("type") != "array"]
    return [value for values in found for value in values] if all(found) else []


def _section(path: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"## {path}\n\n{_one_line(schema['description'])}\n\n| key | value | default | meaning |\n|---|---|---|---|"
    for name, field in schema["properties"].items():
        default = field.get("default")
        default = f"`{default if isinstance(default, str) else shown(default)}`"
        if name in schema.get("required", ()):
            default = "required"
        yield f"| `{path}.{name}` | {_value(field)} | {default} | {_one_line(field['description'])} |"
    yield ""


def _value(schema: dict[str, Any]) -> str:
    """'integer, at least 1 or null'"""
    if "anyOf" in schema:
        return " or ".join(map(_value, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema:
        return "mapping"
    if schema["type"] == "object":
        return f"mapping of {_value(schema['additionalProperties'])}"
    if schema["type"] == "array":
        return f"list of {_value(schema['items'])}"
    limits = {key: schema[key] for key in LIMITS if schema.get(key, MOST) != MOST}
    return TYPES[schema["type"]] + "".join(f", {LIMITS[key]} {value}" for key, value in limits.items())


def _one_line(text: str) -> str:
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", " ".join(text.split()))
