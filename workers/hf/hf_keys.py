"""Keys of a config.json, read with their types: one sentence names a key that is missing or wrong."""

from __future__ import annotations

import math
from typing import Any

from pentad.schedules.ir.errors import PentadError


class Keys:
    """The values of a config.json, or of a mapping `inside` it. A key may have several spellings; null counts as
    missing."""

    def __init__(self, values: dict[str, Any], inside: str = "") -> None:
        self.values, self.inside = values, inside

    def get(self, *names: str) -> Any:
        """The first of them that has a value."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number, at least 1; 0 too where that is the default."""
        value = self._value(names, default)
        least = 1 if default != 0 else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(names, value, f"a whole number, at least {least}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number, at least 0."""
        value = self._value(names, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise self.wrong(names, value, "a number, at least 0")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value((name,), default)
        if not isinstance(value, bool):
            raise self.wrong((name,), value, "true or false")
        return value

    def require(self, name: str, right: Any) -> None:
        """PentadError unless the key is missing or has this value."""
        found = self.get(name)
        if found is not None and found != right:
            raise self.wrong((name,), found, _json(right))

    def wrong(self, names: tuple[str, ...], found: object, expected: str) -> PentadError:
        key = next((name for name in names if self.values.get(name) is not None), names[0])
        return PentadError(f"config.json has {self.inside}{key} {_json(found)}: expected {expected}")

    def _value(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is None and default is None:
            raise PentadError(f"config.json has no {self.inside}{names[0]}: expected one")
        return default if value is None else value


def _json(value: object) -> str:
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(str(value), str(value)[:60])
