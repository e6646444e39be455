"""Configuration errors as sentences: the key, the value found, what was expected, and the nearest remedy."""

from __future__ import annotations

import difflib
import re
import reprlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from pentad.schedules.ir.errors import PentadError, shortened
from pentad.schedules.passes.recompute import PARTS, RECOMPUTE_MODES

SYNONYMS = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "gpu": "cuda"}
NEVER_SAVED = {"layernorm": "results of norms", "moe_act": "gated products"}  # Megatron-LM recomputes these
_BOUNDED = reprlib.Repr()  # bounded work, whatever a value contains
_BOUNDED.maxlevel, _BOUNDED.maxdict, _BOUNDED.maxlist, _BOUNDED.maxtuple = 4, 20, 20, 20
_BOUNDED.maxstring, _BOUNDED.maxlong, _BOUNDED.maxother = 200, 200, 200
_EXPECTED = {  # by pydantic's error type
    "int_type": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "string_type": "text (in quotes, should it look like something else)",
    "string_unicode": "valid Unicode",
    "bool_type": "true or false",
    "list_type": "a list, such as [a, b]",
    "string_pattern_mismatch": "letters, digits, '_', '-' and '.', the first no '-' or '.'",
    "too_long": "at most {max_length} items",
    "string_too_long": "at most {max_length} characters",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
}


class ConfigError(PentadError):
    """Everything wrong with a configuration, one sentence each; `str` gives them one per line."""

    def __init__(self, sentences: Iterable[str]) -> None:
        super().__init__("\n".join(dict.fromkeys(sentences)))

    @property
    def sentences(self) -> list[str]:
        return [shortened(sentence) for sentence in str(self).split("\n")]


class Broken(NamedTuple):
    """A broken rule: the section's key, what was expected, and what was found (default: the value)."""

    key: str
    expected: str
    found: str = ""


class RuleErrors(ValueError):
    """The broken rules of a section, raised through pydantic."""

    def __init__(self, section: BaseModel, broken: Iterable[Broken | str]) -> None:
        self.section, self.broken = section, broken
        super().__init__()

    def sentences(self, path: Iterable[object]) -> Iterator[str]:
        """One sentence for each broken rule of the section at `path`."""
        for rule in self.broken:
            if isinstance(rule, Broken):
                found = rule.found or shown(attrgetter(rule.key)(self.section))
                yield f"{_dotted(*path, rule.key)} is {found}: expected {rule.expected}"
            else:
                yield rule


@cache
def sections_of(config: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """The JSON schemas of a configuration's sections by dotted key, outer ones first; the configuration's own is '',
    that of a list's items 'data.sources[]'."""
    root = config.model_json_schema()

    def walk(path: str, section: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield path, section
        for name, field in section["properties"].items():
            for kind in (field, *field.get("anyOf", ())):
                for suffix, inner in (("", kind), ("[]", kind.get("items", {}))):
                    if "$ref" in inner:
                        key = f"{path}.{name}{suffix}".lstrip(".")
                        yield from walk(key, root["$defs"][inner["$ref"].rpartition("/")[2]])

    return dict(walk("", root))


def is_key(key: str, config: type[BaseModel]) -> bool:
    """Whether there is such a key in a section."""
    section, _, name = key.rpartition(".")
    return section != "" and name in sections_of(config).get(section, {"properties": ()})["properties"]


def sentences(error: ValidationError, config: type[BaseModel]) -> Iterator[str]:
    """One sentence for each error. Unknown keys come first, since they may explain missing ones."""
    for each in sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden"):
        if each["type"] == "value_error":
            yield from each["ctx"]["error"].sentences(each["loc"])
        else:
            yield _sentence(each, config)


def unknown_key(key: str, config: type[BaseModel]) -> str:
    """A sentence that names the nearest key, or else the existing ones."""
    text = f"{key or repr(key)} is unknown"
    if near := near_keys(key, config):
        return f"{text}; did you mean {' or '.join(near)}?"
    known = _names(config)
    top = known.pop("")
    if given := _section_of(key, known):
        return f"{text}: expected one of {given}.{{{', '.join(known[given])}}}"
    return f"{text}: expected a key in one of the sections {', '.join(top)}"


def near_keys(key: str, config: type[BaseModel]) -> list[str]:
    """The nearest key: of the same section, of a section with a similar name, or of any if it is unambiguous; for a
    word without a section, all keys that it may mean."""
    known = _names(config)
    top = known.pop("")
    if "." not in key and (places := _places(key, top, known)):
        return places
    given = _section_of(key, known)
    first, _, rest = key.partition(".")
    section, name = (given, key.removeprefix(f"{given}.")) if given else (nearest(first, top), rest)
    elsewhere = [f"{path}.{name or key}" for path, names in known.items() if (name or key) in names]
    if section and (near := nearest(name, known[section])):
        return [f"{section}.{near}"]
    if section and not given:
        return [section]
    return elsewhere if len(elsewhere) == 1 else []


def _names(config: type[BaseModel]) -> dict[str, list[str]]:
    """The keys of each section, by its path; '' is the root."""
    return {path: list(section["properties"]) for path, section in sections_of(config).items()}


def _section_of(key: str, known: dict[str, list[str]]) -> str:
    """The innermost of the `known` sections that contains a key, or ''. Adds an item of a list to `known`."""
    given = key.rpartition(".")[0]
    known |= {given: known[item]} if (item := _in_any_place(given)) in known else {}
    while given and given not in known:  # the key is inside a value that is not a section
        given = given.rpartition(".")[0]
    return given


def _places(word: str, top: list[str], known: dict[str, list[str]]) -> list[str]:
    """Where a word without a section may belong: the nearest section, or all sections with the nearest key; items of
    lists only if no other section has it."""
    near = nearest(word, dict.fromkeys([*top, *(name for names in known.values() for name in names)]))
    if near in top:
        inner = nearest(word, known.get(near, ())) if word != near else None
        return [f"{near}.{inner}" if inner else near]
    places = [f"{path}.{near}" for path, names in known.items() if near in names]
    return [place for place in places if "[]" not in place] or places


def example_key(section: str, config: type[BaseModel]) -> str:
    """A section's first required key, or its first one."""
    schema = sections_of(config)[section]
    return f"{section}.{[*schema.get('required', ()), *schema['properties']][0]}"


def no_mapping(key: str, config: type[BaseModel]) -> str:
    """What an override should give instead of a mapping."""
    known = sections_of(config)
    if key in known:
        return f"a single key such as {example_key(key, config)}=VALUE"
    return "a list of mappings, in brackets" if f"{key}[]" in known else "a single value (quotes make text of it)"


def nearest(text: str, known: Iterable[str]) -> str | None:
    """The option that was probably meant: a typo, a synonym, initials (lr), or some of the words."""
    options, text = list(known), text.lower()
    given = set(text.split("_")) - {""}
    initials = {"".join(word[0] for word in option.split("_")): option for option in options if "_" in option}
    words = {option: set(option.split("_")) for option in options}
    candidates = [
        *difflib.get_close_matches(text, options, n=1, cutoff=0.85),
        *(option for option in (SYNONYMS.get(text), initials.get(text)) if option in options),
        *sorted((option for option in options if words[option] <= given), key=len, reverse=True),
        *sorted((option for option in options if given and words[option] >= given), key=len),
        *difflib.get_close_matches(text, options, n=1, cutoff=0.6),
    ]
    return candidates[0] if candidates else None


def shown(value: object) -> str:
    """A value in YAML notation, cut to 60 characters."""
    if isinstance(value, BaseModel):
        return "a mapping"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = _BOUNDED.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def has_control_characters(text: str) -> bool:
    """Whether text has control characters or lone surrogates, which can neither be in a path nor be displayed."""
    return any(unicodedata.category(char) in ("Cc", "Cs") for char in text)


def without_control_characters(text: str) -> str:
    """A pydantic validator."""
    if has_control_characters(text):
        raise PydanticCustomError("control_characters", "text without control characters")
    return text


def within_or_auto(least: int, most: int) -> Callable[[object], object]:
    """Makes a pydantic validator; a union's own validation would report several errors."""

    def check(value: object) -> object:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != "auto" and not (is_number and least <= float(str(value)) <= most):
            raise PydanticCustomError("within", f"{least} to {most}, or auto")
        return value

    return check


def two_costs(value: object) -> object:
    """As `within_or_auto`, for data.document_costs."""
    pair = value if isinstance(value, list | tuple) and len(value) == 2 else (True,)
    is_pair = all(isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < inf for each in pair)
    if value != "auto" and not is_pair:
        raise PydanticCustomError("costs", "two numbers, at least 0, such as [2.0e-5, 0.01], or auto")
    return value


def mode_or_parts(value: object) -> object:
    """A pydantic validator of memory.recompute: a mode, or a list of parts of layers."""
    if isinstance(value, list):
        known: tuple[str, ...] = PARTS
        expected, names = f"different names of {listed(PARTS)}", [str(name) for name in value]
    else:
        known, names = (*RECOMPUTE_MODES, "auto"), [str(value)]
        expected = f"one of {listed(known)}, or a list such as [mlp, core_attn]"
    if not names or len({*names}) < len(names):
        raise PydanticCustomError("parts", expected)
    for name in names:
        if name in NEVER_SAVED:
            expected = f"no {name}, because {NEVER_SAVED[name]} are never saved"
            raise PydanticCustomError("parts", expected)
        if name not in known:
            near = f"[{name}]" if name in PARTS else nearest(name, known)
            raise PydanticCustomError("parts", expected + (f" (did you mean {near}?)" if near else ""))
    return value


def listed(names: Iterable[str]) -> str:
    """'one, two or three'"""
    *most, last = names
    return f"{', '.join(most)} or {last}"


def _sentence(error: ErrorDetails, config: type[BaseModel]) -> str:
    key, value, schemas = _dotted(*error["loc"]), error["input"], sections_of(config)
    match error["type"]:
        case "string_unicode" if _in_any_place(key) in schemas:  # a lone surrogate in a key's name
            return unknown_key(f"{key}.{ascii(value)[1:-1]}".lstrip("."), config)
        case "missing" if key in schemas:
            return f"section {key} is missing: expected one with keys such as {example_key(key, config)}"
        case "missing":
            section, _, name = _in_any_place(key).rpartition(".")
            meaning = " ".join(schemas[section]["properties"][name]["description"].split())
            return f"{key} is missing: expected a value: {meaning}"
        case "invalid_key":
            return unknown_key(key, config)
        case "extra_forbidden":
            only_key = f".{next(iter(value))}" if "." not in key and isinstance(value, dict) and len(value) == 1 else ""
            return unknown_key(key + only_key, config)
        case _:
            return f"{key} is {shown(value)}: expected {_expected(error, config)}"


def _expected(error: ErrorDetails, config: type[BaseModel]) -> str:
    limits = error.get("ctx", {})
    match error["type"]:
        case "model_type":
            key = _dotted(*error["loc"])
            example = example_key(_in_any_place(key), config).rpartition(".")[2]
            return f"a mapping with keys such as {key}.{example}"
        case "literal_error":
            options = limits["expected"].replace("'", "")
            near = nearest(str(error["input"]), options.replace(" or ", ", ").split(", "))
            return f"one of {options}" + (f" (did you mean {near}?)" if near else "")
    if error["type"] in _EXPECTED:
        return _EXPECTED[error["type"]].format(**limits)
    return error["msg"][:1].lower() + error["msg"][1:]


def _in_any_place(key: str) -> str:
    """'data.sources[].path', as in the schemas"""
    return re.sub(r"\[\d+\]", "[]", key)


def _dotted(*path: object) -> str:
    """'data.sources[0].path'"""
    return "".join(f"[{part}]" if isinstance(part, int) and at else f".{part}" for at, part in enumerate(path))[1:]
