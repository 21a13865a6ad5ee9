"""Typed access to metadata read from a model's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvern.engine.errors import ModelError


class Fields:
    """Values by name. What does not fit raises ModelError naming file and field. An absent field and null are one
    thing unless a method says otherwise."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number above zero."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(name, f"{value!r} is not a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above zero."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(name, f"{value!r} is not a number above 0")
        return float(value)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number above zero, or None where the field is null. `default` is for an absent one."""
        return None if self.values.get(name, default) is None else self.integer(name, default)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Return a number above zero, or None where the field is null. `default` is for an absent one."""
        return None if self.values.get(name, default) is None else self.number(name, default)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` numbers above zero."""
        values = self._get(name, None)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(name, f"a list of {count} numbers is needed")
        items = Fields(dict(enumerate(values)), f"{self.source}: {name}")  # type: ignore[arg-type]
        return tuple(items.number(place) for place in range(count))  # type: ignore[arg-type]

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"{value!r} is neither true nor false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"{value!r} is not a string")
        return value

    def error(self, name: str, message: str) -> ModelError:
        return ModelError(f"{self.source}: {name}: {message}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.source}: {name} is missing")
        return default
