"""Two surveys of one site tell no fewer numbers apart by their difference than one survey tells of."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from perennial.client.node.survey import respond
from perennial.client.node.told import apart, sketch
from perennial.client.site_data import OwnSite
from perennial.common.survey import SHAPE, SUMS, SURVEY, Asked, Request
from perennial.common.utils.errors import UserError
from perennial.common.wire import CONFIG, REFUSED, ROUND, RUN, from_record, records
from perennial.server.survey.describe import question

COUNTS = Asked(step="counts", columns=("age",), numbers=("age",))
Site = Callable[..., float]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    ages = [f"{20 + number % 7},{'ab'[number % 2]},{number * 1.5}" for number in range(40)]
    (tmp_path / "north.csv").write_text("\n".join(["age,ward,label", *ages]) + "\n")
    return tmp_path / "north.csv"


def told(table: Path, least: str = "10", consent: str = "full") -> float:
    """The sum of ages that the site tells. Raises `UserError` where it does not."""
    own = OwnSite(table, table.stem, label_column="ward")
    settings = {"survey": consent, "state-dir": str(table.parent / "state"), "survey-least": least}

    def ask(action: str, asked: Asked | None) -> RecordDict:
        request = Request(question=question(), asked=asked).model_dump_json()
        content = RecordDict({CONFIG: ConfigRecord({SURVEY: request, RUN: "x", ROUND: 0})})
        return respond(Message(content, 1, action), own, settings).content

    if refused := records(ask(SHAPE, None), ConfigRecord)[CONFIG].get(REFUSED):
        raise UserError(str(refused))
    sums = records(ask(SUMS, COUNTS), ArrayRecord)[SUMS]
    return float(from_record(sums)[SUMS][-1])


def add(table: Path, *ages: object) -> None:
    table.write_text(table.read_text() + "".join(f"{age},a,{age}\n" for age in ages))


def test_a_row_that_is_new_since_the_last_survey_is_not_told_by_the_difference(table: Path) -> None:
    before = told(table)
    assert told(table) == before  # as often as one likes
    add(table, 91)
    with pytest.raises(
        UserError, match=r"fewer than 10 other numbers in column 'age' than on .*its owner may allow"
    ):
        told(table)
    add(table, *range(30, 38))
    with pytest.raises(UserError, match="fewer than 10 other numbers"):  # nine
        told(table)
    add(table, 38)
    assert told(table) == before + 91 + sum(range(30, 39))


def test_each_table_that_was_told_of_counts_and_not_the_last_alone(table: Path) -> None:
    first = table.read_text()
    told(table)
    add(table, *range(50, 62))
    told(table)
    table.write_text(first)
    add(table, 91)
    with pytest.raises(UserError, match="fewer than 10 other numbers"):  # as in the first
        told(table)


def test_a_number_that_is_corrected_is_told_by_no_difference_and_a_name_may_be(table: Path) -> None:
    told(table)
    table.write_text(table.read_text().replace(",b,", ",B,", 3))
    told(table)
    table.write_text(table.read_text().replace("20,a", "21,a", 1))
    with pytest.raises(UserError, match="fewer than 10 other numbers in column 'age'"):
        told(table)


def test_a_site_that_tells_counts_alone_tells_no_number(table: Path) -> None:
    assert told(table, consent="counts") == 0
    add(table, 91)
    assert told(table, consent="counts") == 0
    assert not (table.parent / "state" / "surveys").exists()


def test_the_owner_may_allow_it(table: Path) -> None:
    before = told(table)
    add(table, 91)
    with pytest.raises(UserError):
        told(table)
    for file in (table.parent / "state" / "surveys" / "north.csv").iterdir():
        assert file.stat().st_mode & 0o077 == 0
        file.unlink()
    assert told(table) == before + 91


@pytest.mark.parametrize(("removed", "added"), [(0, 0), (0, 1), (1, 1), (3, 9), (30, 0), (5, 200)])
def test_how_far_two_columns_are_apart(removed: int, added: int) -> None:
    random = np.random.default_rng(0)
    cells = [str(value) for value in random.integers(0, 30, 500)]
    other = [*cells[removed:], *(str(value) for value in random.integers(0, 1000, added)), ""]
    random.shuffle(other)
    found = apart(sketch(cells), sketch(other))
    assert found <= max(removed, added)
    assert found >= 0.8 * max(removed, added)
