"""Raw rows of a messy table, as callers send them: the same features as at the site that trained on such rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from perennial.client.serving import rest
from perennial.client.serving.messages import LONGEST_TEXT, Refused, samples
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.data.site_files import read
from perennial.common.utils.errors import UserError
from perennial.server.results import trained

SCENARIO = OwnData.model_validate(
    {
        "inputs": ["age", "pain", "old"],
        "columns": {
            "age": {"kind": "number", "mean": 50, "scale": 8, "fill": 48, "missing": True},
            "pain": {"kind": "category", "categories": ["none", "some"]},
            "old": {"kind": "number", "mean": 0.5},
        },
    }
)


def column(name: str, datatype: str, data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}


def asked(*inputs: dict[str, Any]) -> torch.Tensor:
    request, _ = rest.parsed(json.dumps({"inputs": list(inputs)}).encode(), None)
    return samples(rest.message(request, b"", "perennial", ""), SCENARIO, 8)


AGE = column("age", "FP32", [34, None, 58])
PAIN = column("pain", "BYTES", ["some", "", "never heard of"])
OLD = column("old", "FP32", [0, 1, 1])


def test_rows_become_what_they_are_at_the_site(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("old,age,pain,label\n0,34,some,0\n1,,,1\n1,58,never heard of,0\n")
    found = read(tmp_path / "s.csv").tensor(SCENARIO.input_shape, SCENARIO.column_names, SCENARIO.cells)
    assert torch.equal(asked(PAIN, AGE, OLD), found)
    assert found.shape == (3, 2 + 3 + 1)


def test_names_as_other_programs_write_them(tmp_path: Path) -> None:
    columns = {
        "thal": {"kind": "category", "categories": ["3", "7"]},
        "old": {"kind": "category", "categories": ["False", "True"]},
    }
    scenario = OwnData.model_validate({"inputs": list(columns), "columns": columns})
    (tmp_path / "s.csv").write_text("thal,old,label\n3.0,true,0\n7,FALSE,1\n,,0\n")
    cells = [column("thal", "BYTES", ["3.0", "7", None]), column("old", "BYTES", ["true", "FALSE", None])]
    request, _ = rest.parsed(json.dumps({"inputs": cells}).encode(), None)
    sent = samples(rest.message(request, b"", "perennial", ""), scenario, 8)
    frame = pd.DataFrame({"thal": [3.0, 7.0, np.nan], "old": [True, False, None]})
    expected = [[1, 0, 0, 0, 1, 0], [0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 1]]
    assert sent.tolist() == trained.samples(frame, scenario).tolist() == expected
    found = read(tmp_path / "s.csv").tensor(scenario.input_shape, scenario.column_names, scenario.cells)
    assert found.tolist() == expected
    truths = frame[:2].astype({"old": bool})
    assert trained.samples(truths, scenario).tolist() == expected[:2]
    with pytest.raises(UserError, match=r"x has more than one column 'old'"):
        trained.samples(pd.concat([frame, frame[["old"]]], axis=1), scenario)


def test_a_column_of_which_no_name_is_known_is_warned_of() -> None:
    kinds = {"smoker": {"kind": "category", "categories": ["False", "True"]}}
    scenario = OwnData.model_validate({"inputs": ["smoker"], "columns": kinds})
    said = r"of column 'smoker' that the run knows, \['False', 'True'\], but \['0', '1'\]; all count as unknown"
    with pytest.warns(UserWarning, match=said):
        assert trained.samples(pd.DataFrame({"smoker": [1, 0, None]}), scenario).tolist() == [[0, 0, 1]] * 3
    for fine in (["True", "1"], [None, None], [False, True]):  # pytest makes an error of a warning
        assert len(trained.samples(pd.DataFrame({"smoker": fine}, dtype=object), scenario)) == 2


@pytest.mark.parametrize(
    "cell",
    ["3", "3.0", "3.00", "-3.000", " 3 ", "\u00a03", "\x1f3", "\u200b3", "3.", "03", "NA", "?", "None", "٣.0"],
)
def test_a_cell_of_text_is_what_it_is_in_training(cell: str, tmp_path: Path) -> None:
    kinds = {"a": {"kind": "category", "categories": ["3", "-3", "?", "None", "٣"]}}
    scenario = OwnData.model_validate({"inputs": ["a"], "columns": kinds})
    (tmp_path / "s.csv").write_text(f"a,label\n{cell},0\n", encoding="utf-8")
    there = read(tmp_path / "s.csv").tensor(scenario.input_shape, scenario.column_names, scenario.cells)
    request, _ = rest.parsed(json.dumps({"inputs": [column("a", "BYTES", [cell])]}).encode(), None)
    assert samples(rest.message(request, b"", "perennial", ""), scenario, 8).tolist() == there.tolist()


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ((AGE, PAIN, column("old", "FP32", [0, None, 1])), "input 'old' has values that are not finite"),
        ((AGE, column("pain", "FP32", [1, 2, 3]), OLD), "input 'pain' has datatype 'FP32', but a column of names"),
        (
            (AGE, column("pain", "BOOL", [True, False, True]), OLD),
            "'pain' has datatype 'BOOL', but a column of names",
        ),
        (
            (AGE, PAIN, column("old", "BOOL", [True, False, True])),
            "'old' has datatype 'BOOL', but the model takes",
        ),
        ((AGE, PAIN, column("old", "INT64", ["a", "b", "c"])), "'old' has datatype 'INT64', but the model takes"),
        ((AGE, {**PAIN, "shape": [2]}, OLD), "input 'pain' has 3 texts, but shape [2] takes 2"),
        ((AGE, column("pain", "BYTES", ["x" * (LONGEST_TEXT + 1)] * 3), OLD), "a text of more than 256 bytes"),
        ((AGE, column("pain", "BYTES", ["some"]), OLD), "the columns have 1 to 3 rows"),
        ((AGE, OLD), "column 'pain' is missing"),
        ((AGE, PAIN, OLD, column("pid", "FP32", [1, 2, 3])), "the model has no column 'pid'"),
        (
            (AGE, column("Pain", "BYTES", ["some"]), OLD),
            "column 'pain' is missing, and the model has no column 'Pain'",
        ),
        ((AGE, PAIN, OLD, OLD), "column 'old' is there more than once"),
        (
            (column("pid", "FP32", [1]),),
            "are ['pid'], but the model has one, 'input', or one for each column: ['age', 'pain', 'old']",
        ),
    ],
)
def test_rows_that_are_refused(inputs: tuple[dict[str, Any], ...], sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        asked(*inputs)
    assert sentence in str(refused.value)


def test_a_wide_table_is_not_listed() -> None:
    names = [f"f{number}" for number in range(300)]
    scenario, frame = OwnData(inputs=tuple(names)), pd.DataFrame({name: [0.0] for name in names})
    for wrong in (frame.drop(columns="f200"), frame.to_numpy()):
        with pytest.raises(UserError, match="'f7', …") as caught:
            trained.samples(wrong, scenario)
        assert "'f8'" not in str(caught.value)
