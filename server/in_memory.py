"""Scenarios of data that a program already has: arrays, and parts of a Hugging Face data set."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perennial.common.data.raw_data import eight_bits
from perennial.common.data.site_files import in_order
from perennial.common.tasks import TaskName
from perennial.common.tasks.numbers import NumbersLoss
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import path_of
from perennial.common.utils.samples import padded, parts_of, vocabulary_of
from perennial.common.utils.suggestions import alike
from perennial.server.arrays import (
    as_array,
    class_array,
    column_names,
    must_be_text,
    numbers,
    shape_text,
    target_array,
    target_settings,
    task_of,
)
from perennial.server.groups import Vocabulary, announced, filled

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from perennial.common.data.scenarios.arrays import Arrays
    from perennial.common.data.scenarios.own_data import OwnData
    from perennial.common.utils.tensors import Tensors

Samples = Sequence[Any]
"""`(x, y)` or `(x, y, environment)`, each of it a NumPy array, a tensor or a list."""
FAR_APART = 1000.0
"""Of the largest and the smallest deviation of columns."""
ONLY = "all"
"""The environment of samples that come without one."""


@dataclass(frozen=True, eq=False)  # tensors have no equality of their own
class InMemory:
    """A scenario whose data are in this process until a run writes them where its clients find them."""

    scenario: Arrays | OwnData
    """What a run's configuration has of it: names, shapes, digests."""
    parts: Mapping[str, Mapping[str, Tensors]] = field(repr=False)
    """What each file holds, by its digest."""

    def save(self, folder: Path | str) -> str:
        """Write the data into a data root; its whole path. A site needs no more of it than its own file.

        Raises `UserError` where they cannot be written, or are others than they were.
        """
        from perennial.common.data.scenarios.arrays import digest_of, store

        place = path_of(folder, "folder")
        try:
            for digest, records in self.parts.items():
                if digest_of(records) != digest:  # they may be the caller's own memory
                    raise UserError("the arrays were changed after from_arrays took them; call it again")
                store(place, records)
        except OSError as error:
            raise UserError(f"the arrays cannot be written into {folder} ({error.strerror or error})") from None
        return str(place.resolve())


def from_arrays(
    clients: Mapping[str, Samples],
    test: Mapping[str, Samples | Mapping[str, Samples]] | None = None,
    *,
    task: TaskName | None = None,
    classes: Sequence[str] | Sequence[int] | npt.NDArray[Any] | None = None,
    class_weights: Sequence[float] | Literal["balanced"] = (),
    targets: Sequence[str] | None = None,
    loss: NumbersLoss = "squared",
    vocabulary: Vocabulary = None,
    validation_fraction: float = 0.1,
    test_fraction: float | None = None,
) -> InMemory:
    """A scenario of arrays in memory: `{"site-a": (x, y, environment), …}`.

    `x`: (n, *shape) numbers; bytes (uint8) are divided by 255, and everything else becomes float32. With a
    `vocabulary` they are ids of tokens below it, and stay whole. A list of sequences of whole numbers may have
    different lengths, and is one of ids in any case. A dict of such `x` by name is a group: all samples have each
    of them. `y`: (n,) whole numbers or texts are classes; (n,) or (n, k) floats are numbers to be predicted;
    (n, k) of 0 and 1, NaN where one is missing, are labels; a pair `(time, happened)` of (n,) each is the time to
    an event, and so is a structured array as scikit-survival has it. `task` says which of these it is: "classes",
    "numbers", "labels" or "event". `targets`: names of numbers or labels, by default those of a frame's columns.
    `loss`: of numbers. `environment`: (n,) whole numbers or texts, or one text for all; without it there is one
    environment. `test`: by environment `(x, y)`, with which every client is tested, or `{"site-a": (x, y), …}`.
    Without `test`, `test_fraction` (0.2) of each environment of a client is for testing. `validation_fraction` is
    held out. `classes`: names of the classes 0, 1, …, or in their order the texts or numbers that `y` has.
    `class_weights`: what a sample of each counts in training, or of labels what a sample that has one does;
    "balanced": as in scikit-learn, by the classes of all clients.

    Warns of names that differ by capitals, blanks or a number's zeros alone: they are classes, or environments, of
    their own. Warns of bytes in one place and numbers beyond 1 in another, of pictures beyond 1, and of channels
    that seem to be last, and of columns of numbers whose scales differ by a thousand. Raises `UserError` with one
    sentence for data that do not fit together.
    """
    import torch
    from pydantic import ValidationError

    from perennial.common.data.scenarios.arrays import TRAIN, Arrays, digest_of
    from perennial.common.utils.suggestions import sentence

    own = _by_name("clients", clients, "site", '{"site-a": (x, y, environment)}')
    by_environment = {} if test is None else _by_name("test", test, "environment", '{"new": (x, y)}')
    shares: dict[str, object] = {"test_fraction": test_fraction, "validation_fraction": validation_fraction}
    for what, share in shares.items():
        if share is not None and not isinstance(share, Real):
            raise UserError(f"{what}: {share!r:.100} is not possible; give a number from 0 to 1")
    if test and test_fraction:
        raise UserError(f"test_fraction = {test_fraction} is not possible with test; leave one of them out")
    kind = task_of(task, own)
    own, by_environment, shape = _of_one_shape(own, by_environment, vocabulary)
    sites = {name: _Part.of(name, own[name], kind) for name in sorted(own)}
    tests = {name: _tests(name, arrays, sites, kind) for name, arrays in by_environment.items()}
    every = [*sites.values(), *(part for parts in tests.values() for part in parts.values())]
    columns = _must_be_alike(sites, every)
    most = vocabulary_of(shape) if shape else _ids_below(every, vocabulary)
    kept = "int64" if most else "float32"
    sites = {name: part.of_type(kept) for name, part in sites.items()}
    tests = {name: {site: part.of_type(kept) for site, part in own.items()} for name, own in tests.items()}
    every = [*sites.values(), *(part for parts in tests.values() for part in parts.values())]
    environments = in_order(value for part in sites.values() for value in (part.environment or [ONLY]))
    if kind == "classes":
        labels = _labels(list(sites.values()), every, classes)
        target: dict[str, Any] = {"labels": tuple(labels.values())}
        target["class_weights"] = _weights(class_weights, labels, sites.values())
    else:
        if classes is not None:
            raise UserError(f"classes is for task='classes', and here that is {kind!r}; leave it out")
        labels = {}
        own_targets = [part.targets for part in sites.values() if part.targets is not None]
        named = next(iter(sites.values())).target_names
        target = target_settings(kind, own_targets, named, targets, class_weights, loss)
    if loss != "squared" and kind != "numbers":
        raise UserError(f"loss = {loss!r} is for task='numbers', and here that is {kind!r}; leave it out")
    unscaled = () if vocabulary or shape else _unscaled(list(sites.values()), columns)
    for doubt in (*_doubts(sites, every, labels if classes is None else {}, environments), *unscaled):
        warnings.warn(doubt, stacklevel=2)
    records: dict[str, dict[str, Tensors]] = {
        name: {TRAIN: part.tensors(labels, environments)} for name, part in sites.items()
    }
    shared: dict[str, Tensors] = {}
    for number, parts in enumerate(tests.values()):
        for site, part in parts.items():
            (records[site] if site else shared)[str(number)] = part.tensors(labels)
    digests = {site: digest_of(tensors) for site, tensors in records.items()}
    try:
        scenario = Arrays.model_validate(
            {
                "sites": tuple(sites),
                "inputs": columns if len(set(columns)) == len(columns) > 0 else every[0].x.shape[1:],
                **target,
                "vocabulary": most,
                "padded": padded(shape or ()),
                "group": {name: _part(part) for name, part in parts_of(shape or ())},
                "environments": tuple(environments),
                "tests": tuple(tests),
                "parts": tuple(digests.values()),
                "shared": digest_of(shared) if shared else "",
                "validation_fraction": validation_fraction,
                "test_fraction": 0.0 if tests else 0.2 if test_fraction is None else test_fraction,
            }
        )
    except ValidationError as error:
        raise UserError(sentence(error)) from None
    for part in every if kind != "classes" else ():
        if wrong := scenario.task.misfit(torch.from_numpy(part.targets)):
            raise UserError(f"{part.name}: y {wrong}")
    files = {digests[site]: tensors for site, tensors in records.items()}
    return InMemory(scenario, files | ({scenario.shared: shared} if shared else {}))


def from_partitions(
    source: Any,
    *,
    x: str | Sequence[str],
    y: str,
    environment: str | None = None,
    split: str = "train",
    test: Any = None,
    class_weights: Sequence[float] | Literal["balanced"] = (),
    validation_fraction: float = 0.1,
    test_fraction: float | None = None,
) -> InMemory:
    """A scenario of a Hugging Face data set that `flwr-datasets` has shared out, a client for each partition.

    `source`: a `FederatedDataset`, whose partitions of `split` these are, or a `Partitioner` that has its data.
    `x`: the column of pictures, of numbers or of lists of numbers, or the columns of a table. `y`: the column of
    the class. `environment`: a column, or None for a single one. `test`: a data set, a split's name, or either by
    the name of a test environment. All of it is read now. The rest is as in `from_arrays`, and so are the errors.
    """
    if hasattr(source, "partitioners"):
        if split not in source.partitioners:
            raise UserError(
                f"split: there is no partitioner of {split!r}, only of {', '.join(source.partitioners)}"
            )
        count = source.partitioners[split].num_partitions
        parts = [source.load_partition(number, split) for number in range(count)]
    elif hasattr(source, "load_partition"):
        parts = [source.load_partition(number) for number in range(source.num_partitions)]
    else:
        raise UserError(f"give a FederatedDataset or a Partitioner of flwr-datasets, not {type(source).__name__}")
    columns = [x] if isinstance(x, str) else list(x) if isinstance(x, Iterable) else [x]
    if not columns:
        raise UserError("x: there must be at least one column")
    for what, column in (*(("x", column) for column in columns), ("y", y), ("environment", environment or "")):
        if not isinstance(column, str):
            raise UserError(f"{what}: {column!r:.100} is not possible; give the name of a column")

    def samples(name: str, part: Any, others: Iterable[str]) -> Samples:
        return _inputs(name, part, columns), *(_values(name, part, column) for column in others)

    width = len(str(len(parts) - 1))
    of_each = [y] if environment is None else [y, environment]
    clients = {
        name: samples(name, part, of_each)
        for number, part in enumerate(parts)
        for name in [f"client-{number:0{width}d}"]
    }
    tests: dict[str, Samples] = {}
    if test is not None:
        sets = test if isinstance(test, Mapping) else {test if isinstance(test, str) else "test": test}
        for name, own in sets.items():
            if isinstance(own, str) and not hasattr(source, "load_split"):
                raise UserError(
                    f"test: {own!r} is the name of a split, and a {type(source).__name__} has none; give the "
                    "data set itself"
                )
            data = source.load_split(own) if isinstance(own, str) else own
            if not hasattr(data, "column_names"):
                raise UserError(f"test: {data!r:.100} is not possible; give a data set, or the name of a split")
            tests[name] = samples(f"test {name!r}", data, [y])
    if any(x.ndim == 4 and x.shape[1] == 3 for x, *_ in (*clients.values(), *tests.values())):
        # Grey or not is nobody's alone.
        clients, tests = ({name: _coloured(own) for name, own in some.items()} for some in (clients, tests))
    feature = parts[0].features[y] if parts and y in parts[0].features else None
    return from_arrays(
        clients,
        None if test is None else tests,
        classes=getattr(feature, "names", None),
        class_weights=class_weights,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
    )


def from_datasets(clients: Mapping[str, Any], test: Mapping[str, Any] | None = None, **arguments: Any) -> InMemory:
    """A scenario of map-style data sets of torch, `{"site-a": dataset, …}`, each of whose items is `(x, y)`.

    All of it is read now, once. `test` has a data set by environment, or by environment and site; all other
    arguments are those of `from_arrays`, and so are the errors.
    """

    def arrays(name: str, given: Any) -> Any:
        if isinstance(given, Mapping):
            return {site: _items(f"{name} of {site}", own) for site, own in given.items()}
        return _items(name, given)

    own = _by_name("clients", clients, "site", '{"site-a": dataset}')
    tests = {} if test is None else _by_name("test", test, "environment", '{"new": dataset}')
    return from_arrays(
        {name: _items(name, given) for name, given in own.items()},
        None if test is None else {name: arrays(f"test {name!r}", given) for name, given in tests.items()},
        **arguments,
    )


# ---------------------------------------------------------------------- inside


def _items(name: str, dataset: Any) -> Samples:
    """All items of a data set as `(x, y)`. Raises `UserError`."""
    import numpy as np

    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(f"{name} must be a map-style data set of (x, y), not {type(dataset).__name__}")
    if not len(dataset):
        raise UserError(f"{name} has no samples")
    xs: list[npt.NDArray[Any]] = []
    ys: list[Any] = []
    for place in range(len(dataset)):
        item = dataset[place]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(f"{name}: sample {place} is no (x, y), but {_kind(item)}")
        x = as_array(name, f"x of sample {place}", item[0])
        if xs and x.shape != xs[0].shape:
            raise UserError(
                f"{name}: x of sample {place} has shape {shape_text(x.shape)}, and sample 0 "
                f"{shape_text(xs[0].shape)}"
            )
        xs.append(x)
        ys.append(item[1].tolist() if hasattr(item[1], "tolist") else item[1])
    return np.stack(xs), np.array(ys)


def _by_name(what: str, arrays: Any, kind: str, example: str) -> dict[str, Any]:
    """Arrays by site or environment. Raises `UserError` where there are none, or their names are not possible."""
    if not isinstance(arrays, Mapping):
        raise UserError(f"{what} must be a dict of arrays by {kind}, such as {example}, not {_kind(arrays)}")
    if not arrays:
        raise UserError(f"{what}: there must be at least one {kind}, as in {example}")
    if twice := [name for name, count in Counter(map(str, arrays)).items() if count > 1]:
        raise UserError(f"{what}: {twice[0]!r} is there twice, as a text and as a number; give one of each")
    must_be_text(what, map(str, arrays))
    return {str(name): own for name, own in arrays.items()}


def _must_be_alike(sites: Mapping[str, _Part], every: Sequence[_Part]) -> tuple[str, ...]:
    """The columns of samples that fit together. Raises `UserError` where they do not."""
    first, shape = every[0], every[0].x.shape[1:]
    if odd := [part for part in every if part.x.shape[1:] != shape]:
        raise UserError(
            f"{odd[0].name}: a sample has shape {shape_text(odd[0].x.shape[1:])}, and in {first.name} "
            f"{shape_text(shape)}; all must be alike"
        )
    frames = [part for part in every if part.columns]
    for part in frames:
        for number, (own, other) in enumerate(zip(part.columns, frames[0].columns, strict=True)):
            if own != other:
                raise UserError(
                    f"{part.name}: column {number} of x is {own!r}, and in {frames[0].name} {other!r}; all must "
                    "have the same columns in the same order"
                )
    first_width = first.targets.shape[1] if first.targets is not None else 0
    for part in every:
        if part.targets is not None and part.targets.shape[1] != first_width:
            raise UserError(
                f"{part.name}: y has {part.targets.shape[1]} numbers for a sample, and in {first.name} "
                f"{first_width}; all must be alike"
            )
    lacking, having = ([own for own in sites.values() if (own.environment is None) is no] for no in (True, False))
    if lacking and having:
        raise UserError(
            f"{lacking[0].name} has no environments, and {having[0].name} has; give all of them some, or none"
        )
    return frames[0].columns if frames else ()


def _of_one_shape(
    own: Mapping[str, Any], tests: Mapping[str, Any], vocabulary: Vocabulary
) -> tuple[dict[str, Any], dict[str, Any], tuple[int, ...] | None]:
    """Samples that are groups, or sequences of different lengths, as arrays, and their shape; any others as they
    are, and no shape. Raises `UserError`."""
    places = {name: arrays for name, arrays in own.items()}
    for name, arrays in tests.items():
        some = {f"test {name!r} of {site}": x for site, x in arrays.items()} if isinstance(arrays, Mapping) else {}
        places |= some or {f"test {name!r}": arrays}
    pairs = {name: a for name, a in places.items() if not isinstance(a, str | Mapping) and hasattr(a, "__len__")}
    shape = announced({name: arrays[0] for name, arrays in pairs.items() if len(arrays)}, vocabulary)
    if shape is None:
        return dict(own), dict(tests), None

    def ready(place: str, arrays: Any) -> Any:
        return (_Ready(filled(place, arrays[0], shape)), *arrays[1:]) if place in pairs else arrays

    made = {name: ready(name, arrays) for name, arrays in own.items()}
    others = {
        name: {site: ready(f"test {name!r} of {site}", x) for site, x in arrays.items()}
        if isinstance(arrays, Mapping)
        else ready(f"test {name!r}", arrays)
        for name, arrays in tests.items()
    }
    return made, others, shape


def _part(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"shape": tuple(shape), "vocabulary": vocabulary_of(shape), "padded": padded(shape)}


@dataclass(frozen=True)
class _Ready:
    """Samples that are as they are kept."""

    x: npt.NDArray[Any]


def _ids_below(every: Sequence[_Part], said: Vocabulary) -> int:
    """How many ids of tokens samples may have; 0 where they are no ids. Raises `UserError`."""
    import numpy as np

    if isinstance(said, Mapping):
        raise UserError("vocabulary: a dict is for samples that are groups; give a number")
    if said is not None and (isinstance(said, bool) or not isinstance(said, int | np.integer) or said < 0):
        raise UserError(f"vocabulary: {said!r:.100} is not possible; give a whole number, or 0 for none")
    if not said:  # whole numbers may as well be ages or counts
        return 0
    if odd := next((part for part in every if part.x.dtype.str[1:] not in ("u1", "i8")), None):
        raise UserError(f"{odd.name}: x must have whole numbers from 0 to {said - 1}, since vocabulary = {said}")
    found, part = max(((int(part.x.max()) + 1, part) for part in every), key=lambda pair: pair[0])
    if found > said:
        raise UserError(f"{part.name}: x has {found - 1}, and vocabulary = {said}; ids of tokens are below it")
    return int(said)


def _doubts(
    sites: Mapping[str, _Part],
    every: Sequence[_Part],
    unnamed: Mapping[int | str, str],
    environments: Sequence[str],
) -> Iterator[str]:
    """What somebody should look at; `unnamed` are classes that nobody has named."""
    import numpy as np

    from perennial.common.survey import all_names, shared_nowhere

    shape = every[0].x.shape[1:]
    if len(shape) == 3 and shape[0] > 4 >= shape[2]:
        yield (
            f"x: a sample has shape {shape_text(shape)}, and pictures are channels x height x width; if the "
            "channels are last, move them: x.transpose(0, 3, 1, 2)"
        )
    pixels = [part for part in every if part.x.dtype == np.uint8]
    if unscaled := [part for part in every if part.x.dtype != np.uint8 and np.abs(part.x).max() > 1]:
        name, most = unscaled[0].name, unscaled[0].x
        if pixels:
            yield (
                f"x: bytes (uint8), as in {pixels[0].name}, are divided by 255, and the numbers in {name}, up to "
                f"{most.max():g}, are not; give the same kind everywhere"
            )
        elif len(shape) == 3 and shape[0] in (1, 3):
            yield (
                f"x: the numbers of pictures, as in {name}, go up to {np.abs(most).max():g} and stay so, but "
                "picture files that `perennial serve` is sent are divided by 255; give bytes (uint8), or numbers "
                "from 0 to 1"
            )
    for what, names in (("y", unnamed.values()), ("environment", environments)):
        for same in alike(names):
            yield f"{what}: {' and '.join(map(repr, same))} look like the same name; if so, spell them alike"
    if every[0].y and isinstance(every[0].y[0], str):  # who may spell the same class otherwise
        labels = {name: all_names(map(str, part.y), ()) for name, part in sites.items()}
        yield from (f"y: {lonely}" for lonely in shared_nowhere(labels))


def _unscaled(sites: Sequence[_Part], columns: Sequence[str]) -> Iterator[str]:
    """A sentence where the deviations of columns of numbers differ by `FAR_APART`."""
    import numpy as np

    if sites[0].x.ndim != 2:
        return
    deviations = np.concatenate([part.x for part in sites], dtype=np.float64).std(axis=0)
    if not (varying := np.flatnonzero(deviations)).size:
        return
    large, small = varying[deviations[varying].argmax()], varying[deviations[varying].argmin()]
    if deviations[large] >= FAR_APART * deviations[small]:
        (one, most), (other, least) = (
            (repr(columns[place]) if columns else f"number {place}", f"{deviations[place]:.2g}")
            for place in (large, small)
        )
        yield (
            f"x: the deviation of {one} is {most} and of {other} {least}, and a network learns little of scales "
            "so far apart; standardise the columns, or give frames to perennial.from_frames, which does so"
        )


def _weights(weights: Any, labels: Mapping[int | str, str], sites: Iterable[_Part]) -> tuple[float, ...]:
    """What a sample of each class counts. Raises `UserError`."""
    from perennial.common.data.scenarios.own_data import BALANCED, balanced

    if isinstance(weights, Iterable) and not isinstance(weights, str | Mapping):
        return tuple(weights)
    if not isinstance(weights, str) or weights != BALANCED:
        raise UserError(
            f"class_weights: {weights!r:.100} is not possible; give a number for each of "
            f"{', '.join(labels.values())}, in this order, or {BALANCED!r}"
        )
    counts = Counter(value for part in sites for value in part.y)
    if absent := [name for value, name in labels.items() if not counts[value]]:
        raise UserError(f"class_weights: no client has a sample of class {absent[0]!r}; give numbers")
    return tuple(balanced({name: counts[value] for value, name in labels.items()}).values())


def _inputs(name: str, part: Any, columns: Sequence[str]) -> npt.NDArray[Any]:
    """Samples of a data set: pictures as (n, channels, height, width) bytes, columns of a table side by side."""
    import numpy as np

    found = []
    for column in columns:
        values = _values(name, part, column)
        if any(hasattr(value, "convert") for value in values):  # PIL's
            if lost := [number for number, value in enumerate(values) if not hasattr(value, "convert")]:
                kind = type(values[lost[0]]).__name__
                raise UserError(
                    f"{name}: sample {lost[0]} has in {column!r} no picture, but {kind}; leave the sample out"
                )
            grey = {picture.mode for picture in values} <= {"1", "L"}
            pixels = []
            for number, picture in enumerate(values):
                try:
                    pixels.append(np.asarray(eight_bits(picture, "L" if grey else "RGB")))
                except ValueError as error:
                    raise UserError(f"{name}: picture {number} of {column!r} cannot be read ({error})") from None
            if len(sizes := {own.shape for own in pixels}) > 1:
                some = " and ".join(sorted(f"{own[1]}x{own[0]}" for own in sizes)[:2])
                raise UserError(
                    f"{name}: pictures of {column!r} are of several sizes, such as {some}; make them alike"
                )
            stacked = np.stack(pixels)
            found.append(stacked[:, None] if grey else stacked.transpose(0, 3, 1, 2))
        else:
            array = as_array(name, column, values)
            found.append(array[:, None] if array.ndim == 1 else array)
    if len(found) > 1 and any(own.ndim != 2 for own in found):
        raise UserError(f"{name}: x: columns of a table must be numbers; give one column of pictures alone")
    return found[0] if len(found) == 1 else np.concatenate(found, axis=1)


def _coloured(samples: Samples) -> Samples:
    """Samples with pictures of three channels."""
    x, *others = samples
    return (x.repeat(3, axis=1), *others) if x.ndim == 4 and x.shape[1] == 1 else samples


def _values(name: str, part: Any, column: str) -> list[Any]:
    """A column of a data set."""
    if column not in part.column_names:
        raise UserError(f"{name}: there is no column {column!r}; there are {', '.join(part.column_names)}")
    return list(part[column])


@dataclass(frozen=True)
class _Part:
    """Samples of one place, of which is known what they are."""

    name: str
    x: npt.NDArray[np.generic]
    y: list[int] | list[str]
    """The classes; empty where there are `targets`."""
    environment: list[str] | None = None
    columns: tuple[str, ...] = ()
    """The names of x's columns, where it is a frame that has names."""
    targets: npt.NDArray[np.float32] | None = None
    """(n, targets)."""
    target_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.x)

    def of_type(self, kept: str) -> _Part:
        """With samples of another type; pixels stay bytes unless they are ids."""
        import numpy as np

        stays = self.x.dtype == kept or (self.x.dtype == np.uint8 and kept == "float32")
        return self if stays else replace(self, x=np.ascontiguousarray(self.x, dtype=kept))

    @classmethod
    def of(cls, name: str, arrays: Any, task: TaskName, most: int = 3) -> _Part:
        """Raises `UserError` where a client's or a test environment's arrays are none."""
        wanted = "(x, y, environment) or (x, y)" if most == 3 else "(x, y)"
        if isinstance(arrays, str | Mapping) or not hasattr(arrays, "__len__") or not 2 <= len(arrays) <= most:
            raise UserError(f"{name} must be {wanted}, not {_kind(arrays)}")
        ready = isinstance(arrays[0], _Ready)
        x = arrays[0].x if ready else as_array(name, "x", arrays[0])
        targets = None if task == "classes" else target_array(name, arrays[1], task)
        y = as_array(name, "y", arrays[1]) if targets is None else targets
        n = len(y) if y.ndim else 0
        if targets is None:
            y = class_array(name, y)
        if x.ndim < 2 or len(x) != n or x.dtype.kind not in "fiub":
            raise UserError(
                f"{name}: x must be numbers, {n} rows as in y and a column for each feature; it is {x.dtype} of "
                f"shape {shape_text(x.shape)}"
            )
        if 0 in x.shape:
            raise UserError(f"{name}: a sample has shape {shape_text(x.shape[1:])}, which has no numbers")
        columns = column_names(arrays[0])
        x = x if ready else numbers(name, x, columns)
        environment = _environments(name, arrays[2], n) if len(arrays) == 3 else None
        if targets is not None:
            return cls(name, x, [], environment, columns, targets, column_names(arrays[1]))
        values = y.tolist()
        labels = [int(value) for value in values] if y.dtype.kind in "iub" else [str(value) for value in values]
        if empty := [at for at, label in enumerate(labels) if isinstance(label, str) and not label.strip()]:
            raise UserError(
                f"{name}: y of sample {empty[0]} is an empty text; name its class, or leave the sample out"
            )
        return cls(name, x, labels, environment, columns)

    def tensors(self, labels: Mapping[int | str, str], environments: Sequence[str] = ()) -> Tensors:
        """As they are written; `environments` are those of a client's own samples."""
        import numpy as np
        import torch

        place = {label: number for number, label in enumerate(labels)}
        found = {
            "x": torch.from_numpy(np.ascontiguousarray(self.x)),
            "y": torch.tensor([place[label] for label in self.y], device="cpu")  # whatever the default is
            if self.targets is None
            else torch.from_numpy(self.targets),
        }
        if environments:
            number = {name: at for at, name in enumerate(environments)}
            own = [number[name] for name in self.environment or [ONLY] * len(self)]
            found["environment"] = torch.tensor(own, device="cpu")
        return found


def _environments(name: str, values: Any, n: int) -> list[str]:
    if isinstance(values, str):
        must_be_text(f"{name}: environment", [values])
        return [values] * n
    if values is None:
        raise UserError(f"{name}: environment is None; give one for each sample, or leave it out")
    found = as_array(name, "environment", values)
    if found.dtype.kind not in "iuUT" or found.shape != (n,):
        raise UserError(
            f"{name}: environment must be {n} whole numbers or texts as in y, or one text; it is {found.dtype} of "
            f"shape {shape_text(found.shape)}"
        )
    return [str(value) for value in found.tolist()]


def _tests(name: str, arrays: Any, sites: Mapping[str, _Part], task: TaskName) -> dict[str, _Part]:
    """A test environment's samples by site, or under "" those that all sites have."""
    if not isinstance(arrays, Mapping):
        return {"": _Part.of(f"test {name!r}", arrays, task, most=2)}
    if strangers := [str(site) for site in arrays if str(site) not in sites]:
        raise UserError(f"test {name!r}: {strangers[0]} is no client; there are {', '.join(sites)}")
    if not arrays:
        raise UserError(f"test {name!r} has no samples for any client")
    return {str(site): _Part.of(f"test {name!r} of {site}", own, task, most=2) for site, own in arrays.items()}


def _labels(
    sites: Sequence[_Part],
    every: Sequence[_Part],
    classes: Sequence[str] | Sequence[int] | npt.NDArray[Any] | None,
) -> dict[int | str, str]:
    """The name of each class, by what `y` has for it, in the order of the classes' numbers."""
    import numpy as np

    texts = {isinstance(part.y[0], str) for part in every}
    if len(texts) > 1:
        odd = next(part for part in every if isinstance(part.y[0], str) is not isinstance(every[0].y[0], str))
        raise UserError(f"y has texts in one of {every[0].name} and {odd.name}, and numbers in the other")
    there: set[int | str] = {label for part in every for label in part.y}
    trained = {label for part in sites for label in part.y}
    if classes is None:
        if beyond := sorted(map(str, there - trained)):
            part = next(part for part in every if not trained.issuperset(part.y))
            raise UserError(
                f"{part.name}: class {beyond[0]} is in no client's samples; name all of them with classes"
            )
        if len(there) < 2:
            raise UserError(f"y is {min(map(str, there))} everywhere; there must be at least two classes")
        return {label: str(label) for label in in_order(there)}
    listed = hasattr(classes, "dtype") or (isinstance(classes, Sequence) and not isinstance(classes, str))
    names: list[Any] = list(classes) if listed else [None]
    numbers = all(isinstance(name, int | np.integer | np.bool_) for name in names)
    if not numbers and not all(isinstance(name, str) for name in names):
        raise UserError(
            f"classes = {classes!r:.100} is not possible; give a list of the classes' names in their order, such "
            "as ['well', 'ill'], or of all numbers that y has"
        )
    named = [int(name) if numbers else str(name) for name in names]
    must_be_text("classes", map(str, named))
    if twice := [name for name, there in Counter(named).items() if there > 1]:
        raise UserError(f"classes: {twice[0]!r} is there twice; name each class once")
    known: dict[int | str, str] = {
        str(name) if True in texts else int(name) if numbers else at: str(name) for at, name in enumerate(names)
    }
    for part in every:
        if beyond := sorted(map(str, set(part.y) - known.keys())):
            raise UserError(f"{part.name}: y has {beyond[0]}, which is none of the {len(names)} classes")
    return known


def _kind(given: Any) -> str:
    length = f" of {len(given)}" if hasattr(given, "__len__") and not isinstance(given, str) else ""
    return f"{type(given).__name__}{length}"
