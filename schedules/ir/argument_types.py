"""Checks the argument types of public functions, so that a wrong type is refused in one sentence like a value out of
range."""

from __future__ import annotations

import builtins
import collections.abc
import inspect
import os
import reprlib
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pentad.schedules.ir.errors import PentadError

P = ParamSpec("P")
T = TypeVar("T")
_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    os.PathLike: "a path",
    type(None): "None",
    collections.abc.Mapping: "a mapping",
    collections.abc.Callable: "a function",
}
_NUMBERS: dict[Any, type] = {int: Integral, float: Real}


def checks_types(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function raise PentadError, before it runs, for an argument that does not have its annotated type.

    Annotations that are imported only for type checkers are not checked.
    """

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value, kinds in _arguments(function, args, kwargs):
            if not any(_is(value, kind) for kind in kinds):
                raise PentadError(f"{name} is {reprlib.repr(value)}: expected {_listed(map(_words, kinds))}")
        return function(*args, **kwargs)

    return checked


def _arguments(
    function: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name, value and types of each argument. Raises TypeError, as Python does, if they do not fit the signature."""
    signature, kinds = _signature(function)
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        parts = value if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL else [value]
        if name in kinds:
            yield from ((name, part, kinds[name]) for part in parts)


@cache
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, tuple[Any, ...]]]:
    """The signature, and the types of each annotated parameter other than **kwargs."""
    signature, module = inspect.signature(function), vars(sys.modules[function.__module__])
    annotated = types.SimpleNamespace(
        __annotations__={
            name: each.annotation
            for name, each in signature.parameters.items()
            if each.annotation is not each.empty and each.kind is not each.VAR_KEYWORD
        }
    )
    # `Any` for names imported only for type checkers, which are found neither in the module nor among the builtins.
    hints = get_type_hints(annotated, module, ChainMap(module, vars(builtins), _Unknown()))
    found = {name: tuple(_flat(kind)) for name, kind in hints.items()}
    return signature, {name: kinds for name, kinds in found.items() if Any not in kinds}


class _Unknown(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return Any


def _flat(kind: Any) -> Iterator[Any]:
    """The types of a union."""
    if get_origin(kind) in (Union, types.UnionType):
        for each in get_args(kind):
            yield from _flat(each)
    else:
        yield kind


def _is(value: Any, kind: Any) -> bool:
    base, inner = get_origin(kind) or kind, get_args(kind)
    if base is Literal:
        return value in inner
    if base in _NUMBERS:
        return isinstance(value, _NUMBERS[base]) and not isinstance(value, bool)
    if base in _WORDS:
        return callable(value) if base is collections.abc.Callable else isinstance(value, base)
    if issubclass(base, Iterable) and inner:  # a container of values of one type
        given = (list, tuple) if base is tuple else base
        is_text = isinstance(value, str | bytes)
        parts = value if isinstance(value, Collection) else ()
        return isinstance(value, given) and not is_text and all(_is(part, inner[0]) for part in parts)
    return isinstance(value, base)


def _words(kind: Any) -> str:
    base, inner = get_origin(kind) or kind, get_args(kind)
    if base is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if base in _WORDS:
        return _WORDS[base]
    if issubclass(base, Iterable) and inner:
        return f"a list of {_WORDS[inner[0]].removeprefix('a ')}{'s' * (inner[0] is not str)}"
    return f"a {base.__name__}"


def _listed(words: Iterable[str]) -> str:
    *most, last = dict.fromkeys(words)
    return f"{', '.join(most)} or {last}" if most else last
