"""The sentence for a name that does not exist, and names that may be one that is spelt in several ways."""

import unicodedata
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches

LONGEST = 100
"""Letters of a name that are looked at and shown: finding what is like it takes the square of its length."""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """`unknown method 'fedvg'; did you mean 'fedavg'? (there are: ditto, fedavg, local)`"""
    names, name = sorted(known), str(name)[:LONGEST]
    return f"unknown {kind} {name!r}{meant(name, names)} (there are: {', '.join(names) or 'none'})"


def meant(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'fedavg'?`, or nothing where no known name is close, whatever its capitals."""
    names = {other.casefold(): other for other in sorted(known, reverse=True)}
    close = get_close_matches(str(name)[:LONGEST].casefold(), sorted(names), n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def alike(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names that differ by capitals, by blanks or by how a number is written alone, together."""
    groups = dict[str | Decimal, list[str]]()
    for name in sorted(set(names)):
        groups.setdefault(_plain(name), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _plain(name: str) -> str | Decimal:
    try:
        if (number := Decimal(name)).is_finite() and "_" not in name:
            return number
    except InvalidOperation:
        pass
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())
