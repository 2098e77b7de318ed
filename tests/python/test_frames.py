"""Frames in memory: prepared as tables of sites are, and equal to the way through CSV; data sets of torch."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from messy_tables import hospitals
from sklearn.datasets import load_breast_cancer
from torch.utils.data import Dataset, Subset, TensorDataset

import perennial
from perennial import UserError, from_arrays, from_datasets, from_frames
from perennial.common.utils.files import load_tensors
from perennial.server.survey.describe import announcement, describe, describe_texts, question

FEW: dict[str, Any] = {"local_steps": 2, "evaluate_every": 3, "checkpoint_every": 3, "model.hidden": [8]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("frames") / "tables"
    hospitals(found)
    return found


def frames(folder: Path) -> dict[str, pd.DataFrame]:
    return {file.stem: pd.read_csv(file, keep_default_na=False, na_values=[""]) for file in folder.glob("*.csv")}


def test_frames_equal_the_way_through_csv_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    scenario = from_frames(frames(folder), impute="median", at_least=3)
    told = describe(folder, (), question(["median"], least=3))
    assert scenario.scenario.model_dump() == told.scenario.model_dump()
    own = perennial.run("ditto", scenario, rounds=3, settings=FEW, out=tmp_path / "own")
    config = tmp_path / "run.toml"
    import tomli_w

    config.write_text(tomli_w.dumps({"scenario": announcement(told.scenario)}))
    options: dict[str, Any] = {"config": config, "data_root": folder, "rounds": 3, "settings": FEW}
    other = perennial.run("ditto", out=tmp_path / "other", **options)
    one, two = (load_tensors(path / "models" / "global.safetensors") for path in (own.folder, other.folder))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert list(own.accuracy) == list(other.accuracy)
    new = frames(folder)["va"].drop(columns="label")
    for name, client in (("global", None), ("personal", "hungary")):
        answers = [result.predict_proba(new, name, client) for result in (own, other)]
        np.testing.assert_array_equal(*answers)
    moved = shutil.move(own.folder, tmp_path / "moved")
    np.testing.assert_array_equal(perennial.load(moved).predict_proba(new, "personal", "hungary"), answers[0])


def test_breast_cancer_is_learned_from_raw_columns(tmp_path: Path) -> None:
    """By way of raw arrays it was the constant, 64.69 %."""
    bunch = load_breast_cancer(as_frame=True)
    every = bunch.frame.sample(frac=1, random_state=0)
    clients = {name: every.iloc[start::3] for start, name in enumerate("abc")}
    scenario = from_frames(clients, "target")
    result = perennial.run("fedavg", scenario, rounds=10, settings={"local_steps": 10}, out=tmp_path / "run")
    means = [row["accuracy"] for row in result.accuracy if row["selection"] == "final"]
    assert np.mean(means) > 0.93
    assert (result.predict(every) == every["target"]).mean() > 0.95
    x, y = bunch.data, bunch.target
    with pytest.warns(UserWarning, match=r"x: the deviation of 'worst area' is 5.7e\+02 and of"):
        from_arrays({"a": (x, y)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_arrays({"a": ((x - x.mean()) / x.std(), y)})


def test_every_kind_of_column(tmp_path: Path) -> None:
    count = 40
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "number": random.normal(size=count),
            "whole": pd.array([None, *range(count - 1)], dtype="Int64"),
            "truth": random.random(count) < 0.5,
            "kind": pd.Categorical(random.choice(["x", "y"], count)),
            "code": pd.Categorical(random.choice([1, 2], count)),
            "mixed": [str(n % 2) if n % 3 else n % 2 for n in range(count)],
            "seven": random.choice(["u", None], count),
            "label": random.choice(["ill", "well"], count),
            "when": random.choice(["day", "night"], count),
        }
    )
    options: dict[str, Any] = {"environment": "when", "impute": {"whole": "mean"}, "at_least": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scenario = from_frames({"a": frame, "b": frame}, categories=["code"], **options)
        frame.to_csv(tmp_path / "a.csv", index=False)
        shutil.copy(tmp_path / "a.csv", tmp_path / "b.csv")
        asked = question(["whole=mean"], ["code"], least=1, environment_column="when")
        told = describe(tmp_path, (), asked).scenario
    assert scenario.scenario == told
    root = Path(scenario.save(tmp_path / "out"))
    one, two = scenario.scenario.client_data(0, 0, root), told.client_data(0, 0, tmp_path)
    assert torch.equal(one.train.x, two.train.x)
    assert torch.equal(one.train.y, two.train.y)
    assert scenario.save(tmp_path / "out") == str(root)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (
            {},
            {},
            r"'age' has 16 empty cells; .*impute='median', or leave the column out with drop=\['age'\]",
        ),
        ({}, {"impute": "middle"}, r"unknown rule 'middle'"),
        ({}, {"impute": {"ages": "mean"}}, r"'ages'"),
        (
            {},
            {"impute": "mean", "label": "outcome"},
            r"no column 'outcome' for the label; .* \(label=…\)",
        ),
        ({}, {"impute": "mean", "class_weights": "heavy"}, r"class_weights: 'heavy' is not possible"),
        ({}, {"impute": "mean", "test_fraction": 1.5}, r"test_fraction: 1.5 is not possible"),
        ({}, {"text": "note"}, r"has no column 'note' of texts"),
        ({}, {"text": "age", "task": "numbers"}, r"task='numbers' is not possible with text; texts have classes"),
        ({}, {"text": "age", "impute": "mean"}, r"leave out impute; with text, a text is all of a"),
        ({}, {"tokenizer": "a.json"}, r"tokenizer: it is for texts; say their column with text"),
        ({}, {"text": "age", "length": 0}, r"length: 0 is not possible; take 1 to 100000 tokens"),
        ({"va": [1, 2]}, {"impute": "mean"}, r"va must be a data frame .*, not list"),
        ({"v a": pd.DataFrame({"label": ["x"]})}, {}, r"clients: 'v a' is no name of a site"),
        ({"va": pd.DataFrame([[1, 2]], columns=["a", "a"])}, {}, r"va has more than one column 'a'"),
        ({"va": pd.DataFrame({"a": [{}], "label": ["x"]})}, {}, r"va: column 'a' has neither text nor"),
    ],
)
def test_frames_that_do_not_fit(folder: Path, change: Any, options: dict[str, Any], words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match=words) as error:
            from_frames({**frames(folder), **change}, **options)
    assert "--" not in str(error.value)
    assert ".parquet" not in str(error.value)


def test_a_column_of_texts_equals_the_way_through_csv_bit_for_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clients, few = {}, {**FEW, "learning_rate": 1.0, "local_steps": 20, "model.name": "embedding-bag"}
    few.pop("model.hidden")
    (tmp_path / "tables").mkdir()
    for site in ("north", "south"):
        ill = rng.random(60) < 0.3
        said = [f"Patient {n} {'is feverish' if no else 'is well'}." for n, no in enumerate(ill)]
        clients[site] = pd.DataFrame({"note": said, "label": np.where(ill, "ill", "well"), "ward": 3})
        clients[site].to_csv(tmp_path / "tables" / f"{site}.csv", index=False)
    scenario = from_frames(clients, text="note", length=6, class_weights="balanced")
    told = describe_texts(tmp_path / "tables", "note", question(), length=6, balance=True)
    assert scenario.scenario.model_dump() == told.scenario.model_dump()
    ill, well = scenario.scenario.class_weights
    assert 1 < ill / well < 4
    own = perennial.run("fedavg", scenario, rounds=3, settings=few, out=tmp_path / "own")
    config = tmp_path / "run.toml"
    import tomli_w

    config.write_text(tomli_w.dumps({"scenario": announcement(told.scenario)}))
    options: dict[str, Any] = {"config": config, "data_root": tmp_path / "tables", "rounds": 3, "settings": few}
    other = perennial.run("fedavg", out=tmp_path / "other", **options)
    one, two = (load_tensors(path / "models" / "global.safetensors") for path in (own.folder, other.folder))
    assert all(torch.equal(one[name], two[name]) for name in one)
    frame = clients["north"]
    assert (own.predict(frame) == frame["label"]).mean() > 0.9
    np.testing.assert_array_equal(own.predict_proba(frame), own.predict_proba(list(frame["note"])))


# ---------------------------------------------------------------------- data sets of torch


class Squares(Dataset[Any]):
    """As people write one: a sample and a plain number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> tuple[Any, int]:
        if place >= self.count:
            raise IndexError
        return torch.full((3,), float(place)), place % 2


def test_map_style_data_sets_are_arrays() -> None:
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    whole = TensorDataset(x, y)
    found = from_datasets({"a": whole, "b": Subset(whole, [0, 3])}, {"new": Squares(4)})
    plain = from_arrays(
        {"a": (x, y), "b": (x[[0, 3]], y[[0, 3]])},
        {"new": (torch.arange(4.0)[:, None].expand(4, 3), torch.arange(4) % 2)},
    )
    assert found.scenario == plain.scenario
    ids = torch.randint(9, (4, 5))
    assert from_datasets({"a": TensorDataset(ids, y[:4])}, vocabulary=9).scenario.vocabulary == 9


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (iter([1]), r"a must be a map-style data set of \(x, y\)"),
        (TensorDataset(torch.zeros(2, 1)), r"a: sample 0 is no \(x, y\), but tuple of 1"),
        ([], r"a has no samples"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 1)], r"a: x of sample 1 has shape 3, and sample 0 2"),
    ],
)
def test_what_is_no_data_set(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_datasets({"a": given})
