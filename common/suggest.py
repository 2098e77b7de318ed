"""The sentence for a name that does not exist."""

from collections.abc import Iterable
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
