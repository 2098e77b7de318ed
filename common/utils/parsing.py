"""JSON and TOML that somebody else may have written."""

import json
import tomllib
from typing import Any


class TooDeepError(ValueError):
    """Python's parser would run out of stack."""

    def __init__(self) -> None:
        super().__init__("it is nested too deeply")


def from_json(text: str | bytes) -> Any:
    """What it says. Raises `ValueError` where it is no JSON; where it is too deep, `TooDeepError`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise TooDeepError from None


def from_toml(text: str) -> dict[str, Any]:
    """What it says. Raises `ValueError` where it is no TOML, as `from_json` does."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TooDeepError from None
