"""`perennial describe`: what a server announces, from one site's data."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from perennial.client.node.describe import announcement, describe
from perennial.common.config import load_config
from perennial.common.data.own import read
from perennial.common.errors import UserError
from perennial.server.cli.main import app

TABLE = "age,sick,ward,one\n10,yes,b,1\n20,no,a,1\n30,no,a,1\n"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    return path


FLAGS = ("--label-column", "sick", "--environment-column", "ward", "--site", "b", "--site", "a")


def test_a_table_is_described_as_a_runs_configuration(table: Path) -> None:
    result = call("describe", table, *FLAGS)
    assert result.exit_code == 0, result.output
    assert tomllib.loads(result.stdout) == {
        "scenario": {
            "name": "own-data", "sites": ["a", "b"], "inputs": ["age", "one"], "labels": ["no", "yes"],
            "environments": ["a", "b"], "label_column": "sick", "environment_column": "ward",
            "mean": [20.0, 1.0], "scale": [8.16497, 1.0],
        }
    }  # fmt: skip
    assert json.loads(call("describe", table, *FLAGS, "--json").stdout) == tomllib.loads(result.stdout)


def test_what_is_described_can_be_rehearsed(table: Path, tmp_path: Path) -> None:
    """The operator writes nothing: the printed text is the run's configuration."""
    table.write_text("age,label\n" + "".join(f"{n % 80},{int(n % 80 > 40)}\n" for n in range(160)))
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text(table.read_text())
    (tmp_path / "run.toml").write_text(call("describe", table, "--site", "a", "--site", "b").stdout)
    result = call(
        "run", "--config", tmp_path / "run.toml", "--method", "fedavg", "--rounds", "2", "--data-root", tmp_path,
        "--device", "cpu", "--out", tmp_path / "run",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    config = load_config(tmp_path / "run.toml")
    x = config.scenario.client_data(0, 0, tmp_path).train.x
    assert -0.3 < float(x.mean()) < 0.3
    assert 0.8 < float(x.std()) < 1.2


def test_classes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.array([10, 9, 0]))
    assert describe(tmp_path / "a.npz", []).labels == ("0", "9", "10")


def pictures(folder: Path, size: tuple[int, int], mode: str = "RGB") -> Path:
    for number, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        Image.new(mode, size, 255 * number).save(folder / name / "1.png")
    return folder


@pytest.mark.parametrize(
    ("size", "mode", "shape"),
    [((20, 30), "RGB", (3, 30, 20)), ((20, 20), "L", (1, 20, 20)), ((4000, 1000), "L", (1, 16, 64))],
)
def test_pictures_are_of_their_most_frequent_size_or_smaller(
    size: tuple[int, int], mode: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    folder = pictures(tmp_path / "p", size, mode)
    Image.new(mode, size).save(folder / "cat" / "2.png")
    Image.new(mode, (7, 7)).save(folder / "cat" / "3.png")
    found = describe(folder, [])
    assert found.input_shape == shape
    assert announcement(found).keys() == {"name", "sites", "inputs", "labels", "environments", "mean", "scale"}


def test_channels_are_normalised_to_mean_0_and_deviation_1(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(3, 2, (50, 2, 4, 4)), y=np.arange(50) % 2)
    found = describe(tmp_path / "a.npz", [])
    x = found.prepare(read(tmp_path / "a.npz").tensor(found.input_shape))
    std, mean = torch.std_mean(x, dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(mean, torch.zeros(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(std, torch.ones(2), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "t.csv has no column 'label' for the label; it has age, sick, ward, one"),
        (("--label-column", "sick"), "t.csv: row 1, column 'ward' is no number"),
        (("--label-column", "one", "--environment-column", "ward"), "column 'sick' is no number"),
        ((*FLAGS, "--site", "a/b"), "sites: ['b', 'a', 'a/b'] is not possible"),
    ],
)
def test_what_cannot_be_described_is_one_sentence(flags: tuple[Any, ...], sentence: str, table: Path) -> None:
    result = call("describe", table, *flags)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_one_class_is_no_task(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.array([1, 1, 1]))
    with pytest.raises(UserError, match=r"a\.npz has samples of class '1' alone; there must be two or more"):
        describe(tmp_path / "a.npz", [])
