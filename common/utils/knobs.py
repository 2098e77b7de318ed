"""A configuration field with everything that a user, a sweep or a reader of the paper wants to know of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Search:
    """Where a sweep looks for a value: one of `values`, or between the two `values` on a plain or log scale."""

    kind: Literal["choice", "uniform", "log"]
    values: tuple[Any, ...]

    def draw(self, generator: np.random.Generator) -> Any:
        """One value; whole numbers where both ends are whole numbers."""
        if self.kind == "choice":
            return self.values[int(generator.integers(len(self.values)))]
        low, high = self.values
        if self.kind == "log":
            value = math.exp(generator.uniform(math.log(low), math.log(high)))
        else:
            value = generator.uniform(low, high)
        return round(value) if isinstance(low, int) and isinstance(high, int) else value

    def __str__(self) -> str:
        if self.kind == "choice":
            return "{" + ", ".join(map(str, self.values)) + "}"
        low, high = self.values
        return f"[{low}, {high}]" + (" log" if self.kind == "log" else "")


def choice(*values: Any) -> Search:
    """Each of the values is as likely."""
    return Search("choice", values)


def between(low: float, high: float, *, log: bool = False) -> Search:
    """Uniform between two values; `log` for a scale parameter. Raises `ValueError` where that has no logarithm."""
    if log and low <= 0:
        raise ValueError(f"between({low}, {high}, log=True): low must be above 0; {low} has no logarithm")
    return Search("log" if log else "uniform", (low, high))


def knob(
    default: Any,
    text: str,
    *,
    symbol: str = "",
    source: str = "",
    search: Search | None = None,
    **bounds: Any,
) -> Any:
    """A pydantic field: default, one-line text, symbol in the paper, where the default comes from, search range.

    `bounds` are pydantic's own (`ge`, `gt`, `le`, `lt`).
    """
    extra: dict[str, Any] = {"symbol": symbol, "source": source}
    if search is not None:
        extra["search"] = asdict(search)
    return Field(default, description=text, json_schema_extra=extra, **bounds)
