"""Paths as callers give them."""

from __future__ import annotations

import os
from pathlib import Path

from perennial.common.utils.errors import UserError

LONGEST, DEEPEST = 255, 4095
"""Bytes of a name and of a whole path, as systems have them."""


def path_of(given: object, name: str) -> Path:
    """The path that a caller gave as the argument of this name. Raises `UserError` for what can be none."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UserError(f"{name}: {given!r:.100} is not possible; give a path, as a text or a pathlib.Path")
    try:
        parts = [len(os.fsencode(part)) for part in text.split("/")]
    except UnicodeEncodeError:  # half a character
        parts = []
    if not text or not parts or "\0" in text:
        raise UserError(f"{name}: {text!r:.100} is no path; it must have letters, and no NUL or half a character")
    if max(parts) > LONGEST or sum(parts) + len(parts) > DEEPEST:
        raise UserError(f"{name}: {text[:40]!r}… is too long for a path; a name has {LONGEST} bytes at most")
    return Path(text)
