"""What sites tell, and what a survey announces, computed a second time by pandas, on tables drawn at random."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_survey import Federation

from perennial.client.node.settings import Consent
from perennial.client.node.survey import Respondent
from perennial.common.data.columns import NumberColumn
from perennial.common.data.site_files import read
from perennial.common.survey import Asked, ColumnShape, Entry, entered
from perennial.common.utils.errors import UserError
from perennial.server.survey.describe import announcement, question
from perennial.server.survey.survey import survey

pd = pytest.importorskip("pandas")
Frame = Any
NUMBERS, NAMES = ("a", "b", "c"), ("ward", "drug")
OWN_LEAST = 5


def drawn(random: np.random.Generator) -> Frame:
    """A table: numbers of any size, equal ones, empty cells, classes and categories of which some are rare."""
    rows = int(random.integers(1, 60))
    table = {}
    for name in NUMBERS:
        values = [
            random.normal(10.0 ** random.integers(-3, 6), 10.0 ** random.integers(-3, 6), rows),
            random.integers(-2, 4, rows).astype(float),
            np.full(rows, 7.25),
            random.permutation(rows).astype(float),
            random.lognormal(0, 3, rows),
        ][random.integers(5)]
        table[name] = np.where(random.random(rows) < random.choice([0, 0, 0.1, 0.9]), np.nan, values)
    shares = random.dirichlet([0.5] * 4)
    for name in (*NAMES, "label"):
        table[name] = np.array(["north", "south", "Zoë, née O'X", "x"])[random.choice(4, rows, p=shares)]
    frame = pd.DataFrame(table)
    frame.loc[random.random(rows) < 0.1, "ward"] = np.nan
    return frame


def kept(counts: Frame, least: int) -> Any:
    """Those values of a column that enough rows have, in order."""
    return counts[counts >= least].sort_index()


def grouped(known: Frame, size: int) -> Frame:
    """Each number replaced by the mean of its group of `size` neighbours; the last group has the rest."""
    known = known.sort_values().reset_index(drop=True)
    place = pd.Series(np.arange(len(known)) // size).clip(upper=max(0, len(known) // size - 1))
    return known.groupby(place).transform("mean")


def check_site(frame: Frame, place: Path, least: int) -> None:
    """What one site tells is what pandas finds, and of fewer than `least` rows it tells nothing."""
    frame.to_csv(place, index=False)
    respondent = Respondent("a", lambda _: read(place), Consent.full, OWN_LEAST)
    asked, most = question(["most-frequent"], least=least), max(least, OWN_LEAST)
    if len(frame) < most:
        with pytest.raises(UserError, match=f"fewer than {most} rows"):
            respondent.table(asked)
        return
    table = respondent.table(asked)
    shape = table.shape()
    assert list(shape.classes) == list(kept(frame["label"].value_counts(), most).index)
    for name in NAMES:
        known = frame[name].dropna()
        expected = ColumnShape(kind="empty")
        if len(known):
            expected = ColumnShape(kind="category", names=tuple(kept(known.value_counts(), most).index))
        assert shape.columns[name] == expected
    for name in NUMBERS:
        known = frame[name].dropna()
        assert shape.columns[name].kind == ("number" if len(known) else "empty")
        assert list(shape.columns[name].values) == list(kept(known.value_counts(), most).index)
        whole = bool(len(known) > 20 and known.is_unique and (known == known.round()).all())
        assert shape.columns[name].all_different == whole

    values = {name: tuple(frame[name].dropna().unique()[:5]) for name in NUMBERS}
    classes = (*frame["label"].unique(), "nobody's")
    counts = Asked(step="counts", classes=classes, columns=(*NUMBERS, *NAMES), numbers=NUMBERS, values=values)
    told = entered(counts, table.sums(counts))
    enough = {
        name: frame[name].dropna() if frame[name].count() >= most else frame[name].iloc[:0] for name in NUMBERS
    }
    expected: dict[Entry, float] = {("rows", "", 0): len(frame)}
    of_class = kept(frame["label"].value_counts(), most)
    expected |= {("class", name, 0): of_class.get(name, 0) for name in classes}
    expected |= {("empty", name, 0): frame[name].isna().sum() for name in (*NUMBERS, *NAMES)}
    expected |= {("count", name, 0): len(known) for name, known in enough.items()}
    expected |= {
        ("value", name, value): kept(enough[name].value_counts(), most).get(value, 0)
        for name in NUMBERS
        for value in values[name]
    }
    sums = {("sum", name, 0): known.sum() for name, known in enough.items()}
    assert {entry: told[entry] for entry in expected} == expected
    assert {entry: told[entry] for entry in sums} == pytest.approx(sums, rel=1e-12, abs=1e-9)

    around = {name: float(frame[name].mean()) for name in NUMBERS if len(enough[name])}
    squares = Asked(step="squares", means=around)
    expected = {("square", name, 0): ((enough[name] - mean) ** 2).sum() for name, mean in around.items()}
    assert entered(squares, table.sums(squares)) == pytest.approx(expected, rel=1e-9, abs=1e-9)

    size = OWN_LEAST * -(-most // OWN_LEAST)
    for name, known in enough.items():
        low, high = float(known.min()) if len(known) else -1.0, float(known.max()) + 1 if len(known) else 1.0
        told_bins = np.array(table.sums(Asked(step="bins", bins={name: (low, high)})))
        edges = [-np.inf, *np.linspace(low, high, 129), np.inf]
        assert told_bins.tolist() == np.histogram(grouped(known, size), edges)[0].tolist()
        assert told_bins.sum() == len(known)
        assert all(count == 0 or count >= most for count in told_bins)


def check_federation(frames: list[Frame], folder: Path, least: int, rule: str) -> bool:
    """What is announced of some sites is what pandas finds in the rows of all that tell; whether it could be."""
    folder.mkdir()
    for number, frame in enumerate(frames):
        frame.to_csv(folder / f"site-{number}.csv", index=False)
    try:
        found = survey(Federation(folder), question([rule], least=least))
    except UserError:
        return False
    least = max(least, 10)  # the sites' own
    frames = [frame for frame in frames if len(frame) >= least]
    assert len(found.sites) == len(frames)
    labels = {name for frame in frames for name in kept(frame["label"].value_counts(), least).index}
    assert set(found.scenario.labels) == labels
    announced = announcement(found.scenario)["columns"]
    for name in NUMBERS:
        told = [frame[name].dropna() for frame in frames if frame[name].count() >= least]
        if name not in announced or not told:
            continue
        known, column = pd.concat(told), NumberColumn.model_validate(announced[name])
        spread = float(known.std(ddof=0))
        assert column.mean == pytest.approx(known.mean(), rel=1e-4, abs=1e-4 * spread)
        if spread > 1e-6 * abs(known.mean()):
            assert column.scale == pytest.approx(spread, rel=1e-4)
        assert column.missing == any(frame[name].isna().any() for frame in frames)
        if rule == "mean" and column.fill is not None:
            assert column.fill == pytest.approx(known.mean(), rel=1e-4, abs=1e-4 * spread)
        if rule == "median" and column.fill is not None:  # in groups of neighbours, within a deviation of the mean
            groups = pd.concat([grouped(own, 10 * -(-least // 10)) for own in told])
            low, high = (
                groups.quantile(share, interpolation=own) for share, own in ((0.4, "lower"), (0.6, "higher"))
            )
            width = 4 * spread / 128
            low, high = (np.clip(end, known.mean() - spread, known.mean() + spread) for end in (low, high))
            assert low - width <= column.fill <= high + width
        if rule == "most-frequent" and column.fill is not None:
            counts = pd.concat([kept(own.value_counts(), least) for own in told]).groupby(level=0).sum()
            assert counts[column.fill] == counts.max()
    return True


@pytest.mark.parametrize("tables", [40, pytest.param(1000, marks=pytest.mark.parity)])
def test_what_a_site_tells_is_what_pandas_finds(tables: int, tmp_path: Path) -> None:
    random = np.random.default_rng(tables)
    for _ in range(tables):
        check_site(drawn(random), tmp_path / "site.csv", int(random.integers(1, 15)))


@pytest.mark.parametrize("federations", [6, pytest.param(300, marks=pytest.mark.parity)])
def test_what_is_announced_is_what_pandas_finds(federations: int, tmp_path: Path) -> None:
    random, announced = np.random.default_rng(federations), 0
    for number in range(federations):
        rule = ("mean", "median", "most-frequent")[number % 3]
        frames = [drawn(random) for _ in range(3)]
        announced += check_federation(frames, tmp_path / str(number), int(random.integers(1, 15)), rule)
    assert announced > federations / 3
