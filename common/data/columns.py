"""What becomes of a table's cells, empty ones included; announced by the server, and the same at every site."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from perennial.common.utils.suggestions import unknown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MOST_CATEGORIES = 100
"""Of a column; beyond it, one feature for each is rarely of use."""
LEAST = 10
"""Rows of a site; it tells a survey nothing of fewer, unless server and site agree on another number."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Part(BaseModel):
    """A column; it has no other keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: object) -> object:
        known = cls.model_fields
        if isinstance(values, Mapping) and (strange := next((key for key in values if key not in known), None)):
            raise ValueError(unknown("setting", strange, known))
        return values


class NumberColumn(Part):
    """`(x − mean) / scale`; where an empty cell is allowed, it counts as `fill`."""

    kind: Literal["number"] = "number"
    mean: Finite = 0.0
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    fill: Finite | None = None
    """None: no cell may be empty."""
    missing: bool = False
    """Whether one more feature is 1 where the cell is empty, else 0."""

    @property
    def width(self) -> int:
        """How many features there are."""
        return 1 + self.missing

    def features(self, values: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float32]":
        """From values (n,), NaN where a cell is empty, to (n, width)."""
        import numpy as np

        empty = np.isnan(values)
        filled = np.where(empty, np.nan if self.fill is None else self.fill, values)
        parts = [(filled - self.mean) / self.scale, *([empty] if self.missing else [])]
        return np.stack(parts, axis=1).astype(np.float32)


class CategoryColumn(Part):
    """One feature for each category, 1 for the cell's; the last one for empty cells and any other text."""

    kind: Literal["category"] = "category"
    categories: tuple[str, ...] = Field(min_length=1, max_length=MOST_CATEGORIES)

    @field_validator("categories")
    @classmethod
    def _check_twice(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("a category is there twice")
        return names

    @property
    def width(self) -> int:
        """How many features there are."""
        return len(self.categories) + 1

    def places(self) -> dict[str, int]:
        """The feature of each text that is one of the categories."""
        return places(self.categories)

    def features(self, texts: Sequence[str]) -> "npt.NDArray[np.float32]":
        """From texts (n,), empty where a cell is, to (n, width)."""
        import numpy as np

        place = self.places()
        unknown = len(self.categories)
        eye = np.eye(self.width, dtype=np.float32)
        return eye[[place.get(text, unknown) for text in texts]]


def places(names: Sequence[str]) -> dict[str, int]:
    """Each name's place, also as other programs write it: 3.0 for 3, 3 for 3.0, and true or TRUE for True."""
    found: dict[str, int] = {}
    for number, name in enumerate(names):
        whole = name.removesuffix(".0")
        if whole.removeprefix("-").isdecimal():
            found |= dict.fromkeys((whole, f"{whole}.0"), number)
        if name.lower() in ("true", "false"):
            found |= dict.fromkeys((name.lower(), name.upper(), name.capitalize()), number)
    return found | {name: number for number, name in enumerate(names)}


AnyColumn = NumberColumn | CategoryColumn
Column = Annotated[AnyColumn, Field(discriminator="kind")]


def width(columns: Mapping[str, AnyColumn]) -> int:
    """How many features all columns have."""
    return sum(column.width for column in columns.values())
