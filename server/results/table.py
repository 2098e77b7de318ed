"""Tables for programs: rows as plain dicts, a frame where pandas is there, and a notebook's view."""

from html import escape
from typing import Any

from perennial.common.utils.errors import UserError

MOST_SHOWN = 60
"""Rows of a table that are printed, and shown in a notebook."""


class Table(list[dict[str, Any]]):
    """Rows with the same columns, as plain dicts. Accuracies are fractions."""

    def frame(self) -> Any:
        """The same as a pandas `DataFrame`. Raises `UserError` where pandas is not installed."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise UserError("a frame needs pandas, which is not installed; uv pip install pandas") from None
        return DataFrame(list(self))

    def __str__(self) -> str:
        """In columns."""
        columns = list(self[0]) if self else []
        rows = [columns, *([_shown(row[name]) for name in columns] for row in self[:MOST_SHOWN])]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += [f"… {len(self) - MOST_SHOWN} more"] * (len(self) > MOST_SHOWN)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks."""
        columns = list(self[0]) if self else []
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        rows = ["".join(f"<td>{escape(_shown(row[name]))}</td>" for name in columns) for row in self[:MOST_SHOWN]]
        rows += [f"<td colspan={len(columns)}>… {len(self) - MOST_SHOWN} more</td>"] * (len(self) > MOST_SHOWN)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
