"""Typed access to the fields of trace.json, whose errors say file, field, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_kvgate.trace.errors import TraceError

#: What a number of a trace may be in size.
SMALLEST, LARGEST = 1e-30, 1e30


@dataclass(frozen=True)
class Fields:
    """One JSON object of ``file``; ``where`` is its path inside, e.g. ``layers[3]``."""

    file: Path
    where: str
    values: Mapping[str, Any]

    def error(self, key: str, found: str, accepted: str) -> TraceError:
        """Say what was found under ``key`` and what is accepted."""
        field = f"{self.where}.{key}" if self.where else key
        return TraceError(f"{self.file}: field {field!r} is {found}; accepted: {accepted}.")

    def value(self, key: str) -> Any:  # noqa: ANN401 - a JSON value
        """Return the raw value under ``key``."""
        if key not in self.values:
            raise self.error(key, "missing", "a value, or null where it is optional")
        return self.values[key]

    def text(self, key: str) -> str:
        """Return a non-empty string that can be printed as it is."""
        value = self.value(key)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise self.error(key, repr(value), "a non-empty string of printable characters")
        return value

    def flag(self, key: str) -> bool:
        """Return true or false; a key that is not there says false."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, repr(value), "true, false, or no such field")
        return value

    def integer(self, key: str, *, minimum: int, maximum: int | None = None) -> int:
        """Return a whole number inside the bounds."""
        value = self.value(key)
        within = isinstance(value, int) and not isinstance(value, bool)
        if not within or value < minimum or (maximum is not None and value > maximum):
            top = "" if maximum is None else f" to {maximum}"
            raise self.error(key, repr(value), f"a whole number from {minimum}{top}")
        return int(value)

    def integer_or_none(self, key: str, *, minimum: int) -> int | None:
        """Return a whole number, or None for null."""
        return None if self.value(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str, *, positive: bool = False) -> float:
        """Return a finite number."""
        value = self.value(key)
        try:
            numeric = isinstance(value, int | float) and not isinstance(value, bool)
            number = float(value) if numeric else math.nan
        except OverflowError:
            number = math.inf
        # the numbers meet float32 arrays, where much smaller ones vanish and larger ones overflow
        too_small = positive and number < SMALLEST
        if not math.isfinite(number) or abs(number) > LARGEST or too_small:
            within = f"from {SMALLEST:g} to" if positive else "in size up to"
            raise self.error(key, repr(value), f"a number {within} {LARGEST:g}")
        return number

    def number_or_none(self, key: str, *, positive: bool = False) -> float | None:
        """Return a finite number, or None for null."""
        return None if self.value(key) is None else self.number(key, positive=positive)

    def numbers_or_none(self, key: str) -> tuple[float, ...] | None:
        """Return a list of finite numbers, or None for null."""
        return None if self.value(key) is None else self._numbers(key, "null or a list of numbers")

    def errors(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers, null for an infinite one; empty where there is no such key."""
        if key not in self.values:
            return ()
        return self._numbers(key, "a list of numbers and nulls", null=math.inf)

    def _numbers(self, key: str, accepted: str, null: float | None = None) -> tuple[float, ...]:
        value = self.value(key)
        if not isinstance(value, list):
            raise self.error(key, repr(value), accepted)
        keyed = {str(position): item for position, item in enumerate(value)}
        numbers = Fields(self.file, f"{self.where}.{key}", keyed)
        return tuple(
            null if null is not None and item is None else numbers.number(position)
            for position, item in keyed.items()
        )

    def child(self, key: str) -> Fields:
        """Return the object under ``key``."""
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.error(key, repr(value), "a JSON object")
        return Fields(self.file, f"{self.where}.{key}" if self.where else key, value)

    def objects(self, key: str) -> tuple[Fields, ...]:
        """Return the list of objects under ``key``, which may be empty."""
        return self.children(key) if self.value(key) != [] else ()

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers from 0; a key that is not there says none."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise self.error(key, repr(value), "a list of whole numbers")
        keyed = {str(position): item for position, item in enumerate(value)}
        numbers = Fields(self.file, f"{self.where}.{key}", keyed)
        return tuple(numbers.integer(position, minimum=0) for position in keyed)

    def children(self, key: str) -> tuple[Fields, ...]:
        """Return the non-empty list of objects under ``key``."""
        value = self.value(key)
        if not isinstance(value, list) or not value:
            raise self.error(key, repr(value), "a non-empty list of objects")
        for position, item in enumerate(value):
            if not isinstance(item, dict):
                raise self.error(f"{key}[{position}]", repr(item), "a JSON object")
        where = f"{self.where}.{key}" if self.where else key
        return tuple(Fields(self.file, f"{where}[{i}]", item) for i, item in enumerate(value))
