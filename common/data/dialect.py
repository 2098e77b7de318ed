"""How another program wrote a `.csv` file: what is between cells, the mark in numbers, the code of letters."""

from dataclasses import dataclass, fields
from typing import Self

from perennial.common.utils.errors import UserError

SEPARATORS = {",": ",", ";": ";", "|": "|", "tab": "\t", "\\t": "\t", "\t": "\t"}
"""As somebody may say them, and as they are in a file."""
DECIMALS = (".", ",")


@dataclass(frozen=True)
class Dialect:
    """Of what is empty: a comma, a point, UTF-8. Raises `UserError` for what is not possible."""

    separator: str = ""
    decimal: str = ""
    encoding: str = ""

    def __post_init__(self) -> None:
        if self.separator and self.separator not in SEPARATORS:
            raise UserError(f"separator: {self.separator!r} is not possible; say ';', '|', tab or ','")
        if self.decimal and self.decimal not in DECIMALS:
            raise UserError(f"decimal: {self.decimal!r} is not possible; say ',' or '.'")
        try:
            "".encode(self.encoding or "utf-8")  # of text, and not one that Python has for bytes, such as hex
        except (LookupError, ValueError):
            raise UserError(
                f"encoding: {self.encoding!r:.60} is none that Python knows; say latin-1, cp1252 or another"
            ) from None

    @property
    def mark(self) -> str:
        """What separates cells."""
        return SEPARATORS[self.separator or ","]

    def said(self) -> dict[str, str]:
        """What is not as usual, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name))}

    @classmethod
    def of(cls, settings: object) -> Self:
        """From what has fields of these names."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


PLAIN = Dialect()
