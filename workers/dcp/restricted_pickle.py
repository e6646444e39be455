"""Reads pickles of plain data with a machine of our own: nothing that a pickle names is imported or called.

A pickle is a program for a stack machine. This one knows the instructions that build numbers, strings, tuples, lists,
dictionaries, and objects of the classes in `known`, for which it calls functions of ours; it refuses everything else.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from pentad.schedules.ir.errors import PentadError

Known = Mapping[str, Any]  # "module name" of a class or constant -> its replacement, a function for a class
_MARK = object()
_VALUES = {*("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = {"PROTO", "FRAME"}


class Record:
    """An object: the name of its class, and its state, which is a dictionary unless the class defines its own."""

    def __init__(self, name: str) -> None:
        self.name, self.state = name, dict[Any, Any]()

    def get(self, key: str) -> Any:
        return self.state.get(key) if isinstance(self.state, dict) else None


def parse_pickle(data: bytes, known: Known, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value of a pickle. `persistent` resolves persistent IDs, with which torch refers to the data of tensors.

    Raises PentadError for an instruction or class that is not allowed, and for data that is not a pickle.
    """
    machine = _Machine(known, persistent)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (value,) = machine.stack
                return value
            machine.execute(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise PentadError(f"a pickle is damaged ({str(error)[:100]}): expected one that torch wrote") from None
    raise PentadError("a pickle is damaged (it has no end): expected one that torch wrote")


class _Machine:
    def __init__(self, known: Known, persistent: Callable[[Any], Any] | None) -> None:
        self.known, self.persistent = known, persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name not in _IGNORED:
            handler = _HANDLERS.get(name)
            if handler is None:
                raise PentadError(f"a pickle has the instruction {name}: expected none but those of plain data")
            handler(self, argument)

    def since_mark(self) -> list[Any]:
        """Pops the values above the last mark, and the mark, from the stack; returns the values."""
        at = max(index for index, value in enumerate(self.stack) if value is _MARK)
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def set_items(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise PentadError(f"a pickle sets an item of a {_type(self.stack[-1])}: expected a dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            self.stack[-1][_hashable(key)] = value

    def look_up(self, name: str) -> None:
        if name not in self.known:
            raise PentadError(f"a pickle names {name.replace(' ', '.')}: expected only classes of torch checkpoints")
        self.stack.append(self.known[name])

    def call(self) -> None:
        arguments = self.stack.pop()
        made = self.stack.pop()
        if not callable(made) or type(arguments) is not tuple:  # the only callables are those in `known`
            raise PentadError(f"a pickle calls a {_type(made)}: expected a class")
        self.stack.append(made(*arguments))

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise PentadError(f"a pickle sets the state of a {_type(self.stack[-1])}: expected an object")
        self.stack[-1].state = state

    def persistent_id(self) -> None:
        if self.persistent is None:
            raise PentadError("a pickle has a persistent ID: expected none")
        self.stack.append(self.persistent(self.stack.pop()))


def _hashable(key: Any) -> Any:
    """A key of a dictionary: a string, or an object as (class, *sorted state). Raises PentadError for other keys, and
    for nested values in the state."""
    if isinstance(key, str):
        return key
    if isinstance(key, Record) and isinstance(key.state, dict):
        for value in key.state.values():
            flat = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(each, str | int | None) for each in flat):
                raise PentadError("a pickle has a key of nested values: expected strings and numbers")
        return key.name, *sorted(key.state.items())
    raise PentadError(f"a pickle has a {_type(key)} as a key: expected a string or a plain object")


def _type(value: Any) -> str:
    """The value's type for errors, not the value: a few bytes of a hostile pickle can make one too long to print."""
    return type(value).__name__


def _append(machine: _Machine, values: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        raise PentadError(f"a pickle appends to a {_type(target)}: expected a list")
    target += values


_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.stack.append(_MARK),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "APPEND": lambda machine, _: _append(machine, [machine.stack.pop()]),
    "APPENDS": lambda machine, _: _append(machine, machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "GLOBAL": lambda machine, name: machine.look_up(name),
    "STACK_GLOBAL": lambda machine, _: machine.look_up(f"{machine.stack.pop(-2)} {machine.stack.pop()}"),
    "REDUCE": lambda machine, _: machine.call(),
    "NEWOBJ": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.persistent_id(),
}
