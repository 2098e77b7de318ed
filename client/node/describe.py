"""From one site's data to what the server announces of all: `perennial describe`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import ValidationError

from perennial.common.config import sentence
from perennial.common.data.own import LABEL, Found, read
from perennial.common.data.scenarios.own import OwnData
from perennial.common.errors import UserError

LONGEST = 64
"""Pixels of a picture's longer side, unless its owner announces more."""


def describe(path: Path, sites: Sequence[str], label: str = LABEL, environment: str = "") -> OwnData:
    """The scenario whose shapes, names and normalisation are those of these data. Raises `UserError`."""
    found = read(path, label, environment)
    inputs = found.columns or _shape(found)
    given: dict[str, Any] = {
        "inputs": inputs,
        "labels": _sorted(found.labels),
        "label_column": label,
        "environment_column": environment,
    }
    if sites:
        given["sites"] = sites
    if found.environments is not None:
        given["environments"] = _sorted(found.environments)
    if len(given["labels"]) < 2:
        raise UserError(f"{found.name} has samples of class {found.labels[0]!r} alone; there must be two or more")
    x = found.tensor(_shape(found), found.columns)
    std, mean = torch.std_mean(x, dim=[dim for dim in range(x.ndim) if dim != 1], correction=0)
    given["mean"], given["scale"] = _short(mean), _short(torch.where(std > 0, std, 1.0))
    try:
        return OwnData(**given)
    except ValidationError as error:
        raise UserError(sentence(error)) from None


def announcement(scenario: OwnData) -> dict[str, Any]:
    """What of it belongs into a run's configuration; what nobody has to say is left out."""
    of_tables = set[str]() if scenario.column_names else {"label_column"}
    every = scenario.model_dump(mode="json", exclude={"test_fraction", "validation_fraction"} | of_tables)
    return {key: value for key, value in every.items() if value not in ("", [])}


def _shape(found: Found) -> tuple[int, ...]:
    """A sample's; of pictures the most frequent size, made smaller where it is large, and grey if all are."""
    if isinstance(found.x, np.ndarray):
        return tuple(found.x.shape[1:])
    sizes, modes = Counter[tuple[int, int]](), set[str]()
    for path in found.x:
        try:
            with Image.open(path) as picture:
                sizes[picture.size] += 1
                modes.add(picture.mode)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"picture {path} cannot be read ({error})") from None
    width, height = max(sizes, key=lambda size: (sizes[size], size))
    smaller = min(1.0, LONGEST / max(width, height))
    return 1 if modes <= {"1", "L"} else 3, max(1, round(height * smaller)), max(1, round(width * smaller))


def _sorted(names: Iterable[str]) -> list[str]:
    """Each name once; numbers by their size."""
    return sorted(set(names), key=lambda name: (int(name), "") if name.isdecimal() else (10**18, name))


def _short(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
