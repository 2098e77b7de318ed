"""Arrays as a program hands them over: what they are, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from perennial.common.tasks import EVERY_TASK, Event, TaskName
from perennial.common.tasks.event import INTERVAL_SHARES, censoring_curve
from perennial.common.tasks.numbers import NumbersLoss
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import unknown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MISSING = ("NoneType", "NAType", "NaTType")
"""Types of what stands for nothing, pandas' own too."""


MOST_CLASSES = 20
"""Different whole numbers that floats may be and still be asked whether they are classes."""


LARGEST_ID = 2**31 - 1


def as_array(name: str, what: str, data: Any) -> npt.NDArray[Any]:
    """A NumPy array of what was given. Raises `UserError` where it is no array."""
    import numpy as np

    if np.ma.is_masked(data):
        raise UserError(f"{name}: {what} has masked values; fill them, or leave out the samples that have some")
    try:
        data = data.detach().cpu() if hasattr(data, "detach") else data
        found = np.asarray(data)
        if found.dtype.kind == "U" and not hasattr(data, "dtype"):  # a list, whose numbers are texts by now
            found = np.asarray(data, object)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of several lengths, a type that NumPy lacks
        raise UserError(f"{name}: {what} is no array ({' '.join(str(error).split())[:100]})") from None
    if found.dtype.kind not in "fiub" and found.ndim == 2:  # of a frame, the first column that is the matter
        for column, values in zip(column_names(data), found.T, strict=False):
            others = {n: value for n, value in enumerate(values) if not isinstance(value, Real | np.bool_)}
            strange = [kind for value in others.values() if (kind := type(value).__name__) not in MISSING]
            if strange:
                raise UserError(
                    f"{name}: column {column!r} of {what} must have numbers, not {strange[0]}; make numbers of it "
                    "(pandas.get_dummies), or write tables and let `perennial describe` encode them"
                )
            if others:
                raise UserError(
                    f"{name}: column {column!r} of {what} is empty for sample {min(others)}; fill it in, or leave "
                    "the sample out"
                )
    if found.dtype.kind == "O":
        kinds = {type(value) for value in found.ravel().tolist()}
        if all(issubclass(kind, str) for kind in kinds):  # pandas' texts
            must_be_text(f"{name}: {what}", found.ravel().tolist())  # NumPy would cut a NUL at the end
            return found.astype(str)
        if all(issubclass(kind, Real | np.bool_) for kind in kinds):  # a frame with numbers and truth values
            return np.array(found.tolist())
        values = found.ravel().tolist()
        missing = [number for number, value in enumerate(values) if value is None or value != value]
        if found.ndim == 1 and missing and len(missing) < len(values):
            raise UserError(f"{name}: {what} has no value for sample {missing[0]}; leave that sample out")
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"{name}: {what} must be numbers or texts of one kind, not {names}")
    if found.dtype.kind in "UT":
        must_be_text(f"{name}: {what}", found.ravel().tolist())
    return found


def numbers(name: str, x: npt.NDArray[Any], columns: Sequence[str] = ()) -> npt.NDArray[Any]:
    """Samples (n, …) as they are kept: bytes, int64 of whole numbers from 0 on, or float32.

    Raises `UserError` for what is no finite number then.
    """
    import numpy as np

    if x.dtype == np.uint8 and not columns:  # a frame's whole numbers are no pixels
        return x
    if x.dtype.kind in "iu" and not columns and x.min() >= 0 and x.max() <= LARGEST_ID:
        return np.ascontiguousarray(x, dtype=np.int64)
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=np.float32)
    wrong = np.argwhere(~np.isfinite(x))
    if len(wrong):
        row, place = wrong[0][:2]
        where = f"column {columns[place]!r}" if columns else f"number {place}" if x.ndim == 2 else "x"
        raise UserError(
            f"{name}: sample {row} has in {where} what is no finite number (as float32); fill it in, or leave the "
            "sample out"
        )
    return x


def column_names(frame: Any) -> tuple[str, ...]:
    """The names of a frame's columns; numbers, which pandas gives where nobody has named them, are none."""
    columns = tuple(getattr(frame, "columns", ()))
    must_be_text("a column of x", map(str, columns))
    return tuple(map(str, columns)) if any(isinstance(name, str) for name in columns) else ()


def class_array(name: str, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Classes (n,) as whole numbers or texts. Raises `UserError`."""
    import numpy as np

    if y.ndim != 1 or not len(y):
        has = "there is none" if y.ndim == 1 else f"it has shape {shape_text(y.shape)}"
        raise UserError(f"{name}: y must have one class for each sample; {has}")
    if y.dtype.kind == "f" and (np.isfinite(y) & (y % 1 == 0)).all():
        return y.astype(np.int64)  # said to be classes
    if y.dtype.kind not in "iubUT":
        raise UserError(f"{name}: y must be whole numbers or texts, not {y.dtype}; or say task='numbers'")
    return y


def target_array(name: str, y: Any, task: TaskName) -> npt.NDArray[np.float32]:
    """Targets (n, targets) float32. Raises `UserError` where they are no numbers."""
    import numpy as np

    if getattr(getattr(y, "dtype", None), "names", None):  # a structured array, whose truth values are the events
        happened, *times = sorted(y.dtype.names, key=lambda field: y.dtype[field].kind != "b")
        if task != "event" or len(times) != 1 or y.dtype[happened].kind != "b":
            raise UserError(f"{name}: y must have a field of truth values and one of times, not {y.dtype.names}")
        y = (y[times[0]], y[happened])
    if task == "event" and isinstance(y, tuple):
        parts = [as_array(name, f"y[{place}]", part) for place, part in enumerate(y)]
        if len(parts) != 2 or any(part.ndim != 1 or len(part) != len(parts[0]) for part in parts):
            raise UserError(
                f"{name}: y must be a pair of times and of whether the event happened, alike in length"
            )
        found = np.stack(
            [part.astype(np.float64) if part.dtype.kind in "fiub" else part for part in parts], axis=1
        )
    else:
        found = as_array(name, "y", y)
    if found.ndim == 1:
        found = found[:, None]
    if found.dtype.kind not in "fiub" or found.ndim != 2 or not len(found):
        raise UserError(
            f"{name}: y must be numbers, one or several for each sample, with task={task!r}; it is "
            f"{found.dtype} of shape {shape_text(found.shape)}"
        )
    if task == "event" and found.shape[1] != 2:
        raise UserError(
            f"{name}: y must be a pair (time, happened) with task='event'; it has {found.shape[1]} columns"
        )
    with np.errstate(over="ignore"):
        targets: npt.NDArray[np.float32] = np.ascontiguousarray(found, dtype=np.float32)
    return targets


def task_of(task: TaskName | None, clients: Mapping[str, Any]) -> TaskName:
    """What `y` is, as was said or as it looks like. Raises `UserError` where it could be either."""
    import numpy as np

    if task is not None:
        if task not in EVERY_TASK:
            raise UserError(unknown("task", str(task), EVERY_TASK))
        return task
    first = next(iter(clients.values()))
    y = first[1] if not isinstance(first, str | Mapping) and hasattr(first, "__len__") and len(first) > 1 else None
    if isinstance(y, tuple) and len(y) == 2 and all(hasattr(part, "__len__") for part in y):
        return "event"
    if getattr(getattr(y, "dtype", None), "names", None):
        return "event"
    parts = [
        np.asarray(part)
        for own in clients.values()
        if not isinstance(own, str | Mapping) and hasattr(own, "__len__") and len(own) > 1
        for part in [own[1].detach().cpu() if hasattr(own[1], "detach") else own[1]]
        if hasattr(part, "dtype") or hasattr(part, "columns") or isinstance(part, Sequence)
    ]
    if not parts or any(part.dtype.kind not in "fiub" for part in parts):
        return "classes"
    if all(part.ndim == 2 for part in parts):
        each = all(np.isin(part[~np.isnan(part.astype(float))], (0, 1)).all() for part in parts)
        return "labels" if each else "numbers"
    if all(part.dtype.kind == "f" and part.ndim == 1 for part in parts):
        values = np.unique(np.concatenate(parts))
        if not len(values):
            return "classes"  # who says that there are none
        if len(values) <= MOST_CLASSES and (values % 1 == 0).all():
            few = ", ".join(f"{value:g}" for value in values[:3])
            raise UserError(
                f"y has floats that are whole numbers, {few} and so on, which may be classes or numbers; say "
                "task='classes' or task='numbers'"
            )
        return "numbers"
    return "classes"


def target_settings(
    task: TaskName,
    parts: Sequence[npt.NDArray[np.float32]],
    named: tuple[str, ...],
    names: Sequence[str] | None,
    weights: Sequence[float] | Literal["balanced"],
    loss: NumbersLoss,
) -> dict[str, Any]:
    """Settings of a scenario whose targets are no classes, from all clients' own. Raises `UserError`."""
    import numpy as np
    import torch

    from perennial.common.data.scenarios.own_data import BALANCED

    if task == "event":
        for part in parts:
            if wrong := Event((1.0,)).misfit(torch.from_numpy(part)):  # whatever the intervals will be
                raise UserError(f"y {wrong}")
    every = np.concatenate(parts).astype(np.float64)
    width = every.shape[1]
    if task == "event":
        called: tuple[str, ...] = ("time", "event")
    else:
        called = named or (("y",) if width == 1 else tuple(f"y{n}" for n in range(1, width + 1)))
    if names is not None:
        called = tuple(map(str, names))
        if len(called) != width:
            raise UserError(
                f"targets = {names!r:.100} is not possible; give a name for each of {width} columns of y"
            )
    found: dict[str, Any] = {"target": task, "labels": called}
    if task == "numbers":
        if not np.isfinite(every).all():
            raise UserError("y has what is no finite number; leave these samples out")
        mean, scale = every.mean(axis=0), every.std(axis=0)
        if not scale.all():
            raise UserError(
                f"y: {called[int(scale.argmin())]} is the same everywhere; there is nothing to predict"
            )
        found["loss"] = loss
        if loss != "poisson":
            found |= {"target_mean": tuple(mean.tolist()), "target_scale": tuple(scale.tolist())}
    elif task == "labels" and isinstance(weights, str):
        positives, negatives = (every == 1).sum(axis=0), (every == 0).sum(axis=0)
        if weights != BALANCED or not (positives.all() and negatives.all()):
            raise UserError(
                f"class_weights: {weights!r:.100} is not possible; give a number for each of {', '.join(called)}"
            )
        found["class_weights"] = tuple((negatives / positives).tolist())
    elif task == "event":
        times = every[np.isfinite(every[:, 0]) & (every[:, 0] > 0), 0]
        ends = np.unique(np.quantile(times, INTERVAL_SHARES).astype(np.float32)) if len(times) else times
        if not len(ends) or not (every[:, 1] == 1).any():
            raise UserError("y: the event happened to no sample after time 0; there is nothing to predict")
        each = np.unique(times.astype(np.float32))  # exactly Kaplan and Meier's
        counts = Event(tuple(each.tolist())).counts(torch.from_numpy(every))
        curve = np.array((1.0, *censoring_curve(*(own.tolist() for own in counts))))
        at_ends = curve[np.searchsorted(each, ends, side="right")]
        found |= {"times": tuple(ends.tolist()), "censoring": tuple(at_ends.tolist()) if at_ends[-1] > 0 else ()}
    if weights and task != "labels":
        raise UserError(f"class_weights is for classes and labels, and here task is {task!r}; leave it out")
    if weights and "class_weights" not in found:
        found["class_weights"] = tuple(weights)
    return found


def must_be_text(what: str, texts: Iterable[str]) -> None:
    """Raises `UserError` for a text that no file can have: with a NUL, or with half a character."""
    for text in sorted(set(texts)):
        if "\0" in text or text.encode(errors="replace").decode() != text:
            raise UserError(f"{what}: {text!r:.100} has a NUL or half a character; spell it with letters alone")


def shape_text(shape: Sequence[int]) -> str:
    """A shape as a person writes it, such as 3x32x32."""
    return "x".join(map(str, shape)) or "of a single number"
