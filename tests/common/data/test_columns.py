"""A table's columns: what becomes of cells, beside scikit-learn's transformers fitted to the same rows."""

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from sklearn.compose import make_column_transformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from perennial.common.config import load_config
from perennial.common.data.columns import CategoryColumn, NumberColumn, width
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.data.site_files import read
from perennial.common.utils.errors import UserError
from perennial.server.survey.describe import describe, question

ROWS = 50


def write(path: Path, ages: list[float], pains: list[str]) -> Path:
    cells = [("" if np.isnan(age) else f"{age}", pain) for age, pain in zip(ages, pains, strict=True)]
    path.write_text("age,pain,label\n" + "".join(f"{age},{pain},{n % 2}\n" for n, (age, pain) in enumerate(cells)))
    return path


@pytest.mark.parametrize("rule", ["median", "mean", "most-frequent"])
def test_the_features_are_those_of_scikit_learn(rule: str, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    ages = np.where(random.random(ROWS) < 0.2, np.nan, random.integers(20, 60, ROWS).astype(float))
    pains = random.choice(["none", "some", "bad"], ROWS)
    path = write(tmp_path / "s.csv", ages.tolist(), pains.tolist())
    scenario = describe(path, asked=question([rule], least=1)).scenario
    found = read(path).tensor(scenario.input_shape, scenario.column_names, scenario.columns)

    strategy = rule.replace("-", "_")
    numbers = make_union(
        make_pipeline(StandardScaler(), SimpleImputer(strategy=strategy)), MissingIndicator(features="all")
    )
    expected = make_column_transformer((numbers, [0]), (OneHotEncoder(sparse_output=False), [1])).fit_transform(
        np.stack([ages.astype(object), pains.astype(object)], axis=1)
    )
    assert found.shape == (ROWS, 2 + 4)
    # A median is found by bins, and so near.
    atol = 1 / 16 if rule == "median" else 1e-5
    np.testing.assert_allclose(found[:, :-1].numpy(), expected.astype(float), atol=atol)
    assert not found[:, -1].any()  # nothing is unknown


def test_what_only_one_site_has_is_unknown() -> None:
    column = CategoryColumn(categories=("a", "b"))
    assert column.features(["b", "", "c", "a"]).tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 1], [1, 0, 0]]


def test_an_empty_cell_counts_as_announced() -> None:
    column = NumberColumn(mean=2, scale=4, fill=10, missing=True)
    assert column.features(np.array([np.nan, 4.0])).tolist() == [[2, 1], [0.5, 0]]
    assert width({"x": column, "y": CategoryColumn(categories=("a",))}) == 4


def test_an_empty_cell_where_none_is_announced(tmp_path: Path) -> None:
    path = write(tmp_path / "s.csv", [1.0, float("nan")], ["none", "none"])
    columns = {"age": NumberColumn(), "pain": CategoryColumn(categories=("none",))}
    with pytest.raises(UserError, match=r"s.csv: row 2, column 'age' is empty"):
        read(path).tensor((3,), ("age", "pain"), columns)


def test_numbers_that_are_names_are_alike_however_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("ward,label\n3.0,a\n3,b\n10,a\n")
    columns = {"ward": CategoryColumn(categories=("3", "10"))}
    assert read(tmp_path / "s.csv").tensor((3,), ("ward",), columns).tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0]]


def test_columns_that_are_ignored_may_be_there(tmp_path: Path) -> None:
    path = write(tmp_path / "s.csv", [1.0, 2.0], ["none", "bad"])
    assert read(path).tensor((1,), ("age",), ignored=("pain",)).tolist() == [[1], [2]]
    with pytest.raises(UserError, match=r"column 'pain', which the server does not announce"):
        read(path).tensor((1,), ("age",))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"columns": {"x1": {"kind": "number"}}}, "there must be one for each name in inputs, or none; 'x2'"),
        ({"columns": {"x1": {"kind": "number"}, "x3": {"kind": "number"}}}, "'x3' is in one alone"),
        ({"inputs": ["age"], "columns": {"aeg": {"kind": "number"}}}, "'aeg' is in one alone; did you mean 'age'"),
        (
            {"columns": {"x1": {"kind": "number", "maen": 1}, "x2": {"kind": "number"}}},
            "'maen'; did you mean 'mean'",
        ),
        ({"columns": {"x1": {"kind": "category", "categorys": ["a"]}}}, "'categorys'; did you mean 'categories'"),
        ({"mean": [0, 0], "columns": {x: {"kind": "number"} for x in ("x1", "x2")}}, "leave out those of all"),
        ({"columns": {"x1": {"kind": "text"}, "x2": {"kind": "number"}}}, "number"),
        ({"columns": {"x1": {"kind": "category", "categories": []}, "x2": {"kind": "number"}}}, "at least 1"),
        ({"columns": {"x1": {"kind": "category", "categories": ["a", "a"]}, "x2": {}}}, "twice"),
        ({"columns": {"x1": {"kind": "number", "scale": 0}, "x2": {"kind": "number"}}}, "greater than 0"),
    ],
)
def test_what_cannot_be_announced(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        OwnData.model_validate(given)


def test_a_kind_that_is_misspelt() -> None:
    columns = {"x1": {"kind": "nubmer"}, "x2": {"kind": "number"}}
    said = (
        r"^scenario\.columns\.x1: unknown kind 'nubmer'; did you mean 'number'\? \(there are: category, number\)"
    )
    with pytest.raises(UserError, match=said):
        load_config(options={"scenario": {"name": "own-data", "columns": columns}, "method": "fedavg"})
