"""YAML with the scalars of YAML 1.2 and without duplicate keys: `1e-3` is a number, `on` and `2024-01-01` are text.

The number of values is limited with aliases expanded: a few bytes of text may not become a million values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import yaml

from pentad.schedules.ir.errors import PentadError

MOST_VALUES = 100_000  # of a text, with aliases expanded
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INTEGER = rf"(?:0|(?!0){_DIGITS})"
_SCALARS = {
    "null": r"~|null|",
    "bool": r"true|false",
    "int": rf"[-+]?{_INTEGER}",
    "float": rf"[-+]?(\.[0-9]+|{_INTEGER}(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
}


class _Loader(yaml.SafeLoader):
    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _values(node, {}) > MOST_VALUES:
            problem = f"its aliases repeat more than {MOST_VALUES} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, TypeError):  # `!!timestamp` and other tags whose value is of another type
            problem = f"{node.tag} has another value than its type"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} appears twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode, construct: Callable[..., float]) -> float:
        try:
            return construct(self, node)
        except (ValueError, LookupError):  # `!!int x`, `!!int` alone, or more digits than Python converts
            text = node.value if len(node.value) <= 20 else f"{node.value[:17]}..."
            raise yaml.MarkedYAMLError(problem=f"{text!r} is no number", problem_mark=node.start_mark) from None


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of scalars and collections in a node, with repeated ones counted again. Raises MarkedYAMLError if it
    contains itself."""
    if (found := known.get(id(node))) == 0:
        raise yaml.MarkedYAMLError(problem="an alias refers to a value that contains it", problem_mark=node.start_mark)
    if found is None:
        known[id(node)] = 0
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = (part for each in inner for part in (each if isinstance(each, tuple) else (each,)))
        known[id(node)] = found = 1 + sum(_values(part, known) for part in parts)
    return found


class _Dumper(yaml.SafeDumper):
    pass


_Loader.yaml_implicit_resolvers, _Dumper.yaml_implicit_resolvers = {}, {}
for _kind, _pattern in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})\Z"), None)
for _kind in ("int", "float"):
    _construct = partial(_Loader.construct_number, construct=getattr(yaml.SafeLoader, f"construct_yaml_{_kind}"))
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _construct)


def load_yaml(text: str, source: str) -> Any:
    """Plain data. Raises PentadError with the name of the `source` and the error's line and column."""
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise PentadError(f"{source}{where}: {error.problem or error.context}: expected valid YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise PentadError(f"{source}: {reason}: expected valid YAML") from None


def dump_yaml(value: dict[str, Any]) -> str:
    """Text that `load_yaml` reads back, inner mappings on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=10_000, allow_unicode=True)
