"""Typed access to the keys of a config.json; errors name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pentad.schedules.ir.errors import PentadError


class Keys:
    """The values of a config.json, or of a mapping in it (`prefix`). Several names of a key are alternative spellings.

    A null value counts as missing. A missing key without a default raises PentadError, as does a wrong value.
    `defaults` are used by `read`.
    """

    def __init__(self, values: dict[str, Any], prefix: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self.values, self.prefix, self.defaults = values, prefix, defaults or {}

    def get(self, *names: str) -> Any:
        """The value of the first of these names that has one, else None."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def read(self, name: str) -> Any:
        """A flag, number or count, depending on the type of the key's default."""
        default = self.defaults.get(name)
        if isinstance(default, bool):
            return self.flag(name, default=default)
        return (self.number if isinstance(default, float) else self.count)(name, default=default)

    def count(self, *names: str, default: int | None = None) -> int:
        """An integer of at least 1, or 0 if that is the default."""
        value = self._value(names, default)
        minimum = 1 if default != 0 else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.wrong(names, value, f"an integer of at least {minimum}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number of at least 0."""
        value = self._value(names, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise self.wrong(names, value, "a number of at least 0")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value((name,), default)
        if not isinstance(value, bool):
            raise self.wrong((name,), value, "true or false")
        return value

    def require(self, name: str, expected: Any) -> None:
        """Raises PentadError unless the key is missing or has this value."""
        found = self.get(name)
        if found is not None and found != expected:
            raise self.wrong((name,), found, json_text(expected))

    def wrong(self, names: tuple[str, ...], found: object, expected: str) -> PentadError:
        key = next((name for name in names if self.values.get(name) is not None), names[0])
        return PentadError(f"config.json has {self.prefix}{key} {json_text(found)}: expected {expected}")

    def _value(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is None and default is None:
            raise PentadError(f"config.json has no {self.prefix}{names[0]}: expected a value")
        return default if value is None else value


def json_text(value: object) -> str:
    """A value as spelled in JSON, shortened."""
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(str(value), str(value)[:60])
