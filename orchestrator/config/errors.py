"""Configuration errors as sentences: the key, the value found, what was expected, and the nearest remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pentad.schedules.ir.errors import PentadError

Sections = Mapping[str, type[BaseModel]]
SYNONYMS = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "gpu": "cuda"}


class ConfigError(PentadError):
    """Everything that is wrong with a configuration, one sentence an error; `str` gives a line for each."""

    def __init__(self, sentences: Iterable[str]) -> None:
        super().__init__("\n".join(dict.fromkeys(sentences)))

    @property
    def sentences(self) -> list[str]:
        return str(self).split("\n")


class RuleErrors(ValueError):
    """Sentences of a section's rules, on their way through pydantic."""

    def __init__(self, sentences: list[str]) -> None:
        self.sentences = sentences
        super().__init__("\n".join(sentences))


def keys(sections: Sections) -> dict[str, str]:
    """The description of every field by its dotted key."""
    return dict(pair for name, section in sections.items() for pair in _keys_of(name, section))


def sentences(error: ValidationError, sections: Sections) -> Iterator[str]:
    """One for each error. Unknown keys come first, since they may explain missing ones."""
    for each in sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden"):
        if each["type"] == "value_error":
            yield from each["ctx"]["error"].sentences
        else:
            yield _sentence(each, sections)


def unknown_key(key: str, sections: Sections) -> str:
    """Names the nearest key: of the same section, of a section with a similar name, or of any if it is unambiguous."""
    known = _names_by_section(sections)
    section, _, name = key.rpartition(".")
    while section and section not in known:  # a key inside a value that is no section
        section, _, inner = section.rpartition(".")
        name = f"{inner}.{name}"
    text = f"{key or repr(key)} is unknown"
    if section:
        near = nearest(name, known[section])
        elsewhere = [f"{path}.{name}" for path, names in known.items() if name in names]
        if near or len(elsewhere) == 1:
            return f"{text}; did you mean {f'{section}.{near}' if near else elsewhere[0]}?"
        return f"{text}: expected one of {section}.{{{', '.join(known[section])}}}"
    first, _, rest = key.partition(".")
    similar = nearest(first, sections)
    if similar:
        near = nearest(rest, known[similar]) if rest else None
        return f"{text}; did you mean {f'{similar}.{near}' if near else similar}?"
    elsewhere = [f"{path}.{rest}" for path, names in known.items() if rest in names]
    if len(elsewhere) == 1:
        return f"{text}; did you mean {elsewhere[0]}?"
    return f"{text}: expected a key in one of the sections {', '.join(sections)}"


def example_key(section: str, sections: Sections) -> str:
    """A section's first required key, or its first one."""
    fields = sections[section].model_fields
    return f"{section}.{next((name for name, field in fields.items() if field.is_required()), next(iter(fields)))}"


def nearest(text: str, known: Iterable[str]) -> str | None:
    """The option that was probably meant: a typing error, a synonym, initials (lr), or some of the words."""
    options, text = list(known), text.lower()
    initials = {"".join(word[0] for word in option.split("_")): option for option in options if "_" in option}
    words = {option: set(option.split("_")) for option in options}
    fewer = [option for option in options if words[option] <= set(text.split("_"))]
    more = [option for option in options if words[option] >= set(text.split("_"))]
    candidates = [
        *difflib.get_close_matches(text, options, n=1, cutoff=0.85),
        *(option for option in (SYNONYMS.get(text), initials.get(text)) if option in options),
        *sorted(fewer, key=len, reverse=True),
        *sorted(more, key=len),
        *difflib.get_close_matches(text, options, n=1, cutoff=0.6),
    ]
    return candidates[0] if candidates else None


def shown(value: object) -> str:
    """A value as YAML has it, cut to 60 characters."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def inner_sections(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections that a field may hold."""
    for inner in get_args(annotation):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield inner


def _keys_of(path: str, section: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        yield f"{path}.{name}", field.description or ""
        for inner in inner_sections(field.annotation):
            yield from _keys_of(f"{path}.{name}", inner)


def _sentence(error: ErrorDetails, sections: Sections) -> str:
    key, value = ".".join(map(str, error["loc"])), error["input"]
    match error["type"]:
        case "missing" if key in sections:
            return f"section {key} is missing: expected one with keys such as {example_key(key, sections)}"
        case "missing":
            return f"{key} is missing: expected a value: {keys(sections)[key]}"
        case "invalid_key":
            return unknown_key(key, sections)
        case "extra_forbidden":
            only_key = f".{next(iter(value))}" if "." not in key and isinstance(value, dict) and len(value) == 1 else ""
            return unknown_key(key + only_key, sections)
        case _:
            return f"{key} is {shown(value)}: expected {_expected(error, sections)}"


def _expected(error: ErrorDetails, sections: Sections) -> str:
    limits = error.get("ctx", {})
    match error["type"]:
        case "int_type":
            return "a whole number"
        case "float_type" | "finite_number":
            return "a finite number"
        case "string_type":
            return "text (in quotes, should it look like something else)"
        case "bool_type":
            return "true or false"
        case "model_type":
            path = ".".join(map(str, error["loc"]))
            example = (
                example_key(path, sections) if path in sections else f"{path}.{_names_by_section(sections)[path][0]}"
            )
            return f"a mapping with keys such as {example}"
        case "list_type":
            return "a list such as [0, 1]"
        case "string_pattern_mismatch":
            return "letters, digits, '_', '-' and '.', the first no '-' or '.'"
        case "string_too_long":
            return f"at most {limits['max_length']} characters"
        case "literal_error":
            options = limits["expected"].replace("'", "")
            near = nearest(str(error["input"]), options.replace(" or ", ", ").split(", "))
            return f"one of {options}" + (f" (did you mean {near}?)" if near else "")
        case "greater_than_equal":
            return f"at least {limits['ge']}"
        case "greater_than":
            return f"more than {limits['gt']}"
        case "less_than_equal":
            return f"at most {limits['le']}"
        case "less_than":
            return f"less than {limits['lt']}"
        case _:
            message = error["msg"]
            return message[:1].lower() + message[1:]


def _names_by_section(sections: Sections) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in keys(sections):
        section, _, name = key.rpartition(".")
        found.setdefault(section, []).append(name)
    return found
