"""The sentence for a name that does not exist."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """`unknown method 'fedvg'; did you mean 'fedavg'? (there are: ditto, fedavg, local)`"""
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {str(name)!r}{hint} (there are: {', '.join(names) or 'none'})"
