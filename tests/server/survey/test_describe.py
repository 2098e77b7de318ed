"""`perennial describe`: what a server announces, from one site's data."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from typer.testing import CliRunner, Result

from perennial.client.node.survey import Respondent
from perennial.common.config import load_config
from perennial.common.data.columns import CategoryColumn
from perennial.common.data.site_files import read
from perennial.common.data.tables import number_cells
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.survey import describe as describing
from perennial.server.survey.describe import announcement, describe, question
from perennial.server.survey.survey import announced

TABLE = "age,sick,ward,one\n10,yes,b,1\n20,no,a,1\n30,no,a,1\n"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    return path


SMALL = ("--at-least", "1")
FLAGS = (*SMALL, "--label-column", "sick", "--environment-column", "ward", "--site", "b", "--site", "a")


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
    for site, names in {"a": ("yes", "no"), "b": ("TRUE", "FALSE"), "c": ("no", "yes")}.items():
        rows = f"1,{names[0]},ill\n2,{names[1]},well\n" * 20
        (tmp_path / f"{site}.csv").write_text(f"x,smoker,label\n{rows}")
    said = "of column 'smoker' b shares no category with any other site (FALSE, TRUE, elsewhere no, yes); if they"
    assert said in call("describe", tmp_path).stderr
    (tmp_path / "b.csv").unlink()
    assert "shares no" not in call("describe", tmp_path).stderr
    (tmp_path / "c.csv").write_text("x,smoker,label\n" + "1,yes,1\n2,no,0\n" * 20)
    said = "perennial: a and 1 more shares no class with any other site (ill, well, elsewhere 0, 1); if they mean"
    assert said in call("describe", tmp_path).stderr
    (tmp_path / "c.csv").unlink()

    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.array([10, 9, 0]))
    assert describe(tmp_path / "a.npz").scenario.labels == ("0", "9", "10")


def test_a_folder_of_arrays_and_options_of_tables_are_one_sentence_each(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((4, 2)), y=np.array([0, 1, 0, 1]))
    with pytest.raises(UserError, match=r"has arrays of several sites; describe one site's, such as .*a\.npz$"):
        describe(tmp_path)
    told = call("describe", tmp_path / "a.npz", "--drop", "x1")
    assert (told.exit_code, "--drop is for tables, and a.npz is none; leave it out" in told.stderr) == (2, True)
    (tmp_path / "heart" / "ill").mkdir(parents=True)
    told = call("describe", tmp_path / "heart", "--impute", "median")
    assert f"--impute is for tables, and {tmp_path / 'heart'} has none (.csv, .parquet)" in told.stderr
    assert "--encoding is for tables" in call("describe", tmp_path / "heart", "--encoding", "latin-1").stderr


def test_tables_of_another_dialect_are_announced_with_it_and_run(tmp_path: Path) -> None:
    plain = "size,ward,label\n" + "1.5,Köln,ill\n2.25,Bonn,well\n" * 10
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text(plain)
    as_usual = describe(tmp_path).scenario
    other = plain.replace(",", ";").replace(".", ",").encode("latin-1")
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_bytes(other)
    options = ("--separator", ";", "--decimal", ",", "--encoding", "latin-1")
    told = call("describe", tmp_path, *options, "--out", tmp_path / "own.toml")
    assert told.exit_code == 0, told.output
    run = load_config(tmp_path / "own.toml", {"method": "fedavg", "data_root": str(tmp_path)})
    said = {"separator": ";", "decimal": ",", "encoding": "latin-1"}
    assert run.scenario == as_usual.model_copy(update=said)
    assert len(run.scenario.client_data(0, 0, tmp_path).train.y) > 5
    assert "--separator" in call("describe", tmp_path, "--encoding", "latin-1").stderr


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
    found = describe(folder).scenario
    assert found.input_shape == shape
    assert announcement(found).keys() == {"name", "sites", "inputs", "labels", "environments", "mean", "scale"}


def test_channels_are_normalised_to_mean_0_and_deviation_1(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(3, 2, (50, 2, 4, 4)), y=np.arange(50) % 2)
    found = describe(tmp_path / "a.npz").scenario
    x = found.prepare(read(tmp_path / "a.npz").tensor(found.input_shape))
    std, mean = torch.std_mean(x, dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(mean, torch.zeros(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(std, torch.ones(2), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            (),
            "t.csv has no column 'label' for the label; it has age, sick, ward, one; rename one, or say which it",
        ),
        ((*SMALL, "--label-column", "one", "--environment-column", "ward"), "has samples of class '1' alone"),
        ((*FLAGS, "--site", "a/b"), "sites: ['b', 'a', 'a/b'] is not possible"),
    ],
)
def test_what_cannot_be_described_is_one_sentence(flags: tuple[Any, ...], sentence: str, table: Path) -> None:
    result = call("describe", table, *flags)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_data_that_are_not_there_are_named_with_their_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "hospitals", tmp_path / "hospitals" / "a.csv"):
        with pytest.raises(UserError, match=f"^there is no file or folder {path}$"):
            describe(path)


def test_one_class_is_no_task(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.array([1, 1, 1]))
    with pytest.raises(UserError, match=r"a\.npz has samples of class '1' alone; there must be two or more"):
        describe(tmp_path / "a.npz")


# ---------------------------------------------------------------------- messy tables

PAINS = ("typical", "none", "?")
MESSY = "id,age,pain,note,when,same,sick\n" + "".join(
    f"{n},{'' if n % 7 == 0 else 30 + n},{PAINS[n % 3]},text {n},2024-01-{n % 28 + 1:02},5,{n % 2}\n"
    for n in range(60)
)
OUT = ("--drop", "note", "--drop", "when", "--drop", "id", "--label-column", "sick")


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    path = tmp_path / "m.csv"
    path.write_text(MESSY)
    return path


def test_empty_cells_and_text_are_announced(messy: Path) -> None:
    result = call("describe", messy, *OUT, "--impute", "median", "--impute", "same=mean")
    assert result.exit_code == 0, result.output
    scenario = tomllib.loads(result.stdout)["scenario"]
    ages = [30 + n for n in range(60) if n % 7]
    assert scenario["inputs"] == ["age", "pain", "same"]
    assert scenario["ignored"] == ["id", "note", "when"]
    assert scenario["columns"] == {
        "age": {
            "kind": "number", "missing": True, "fill": pytest.approx(np.median(ages), abs=np.std(ages) / 16),
            "mean": pytest.approx(np.mean(ages), rel=1e-5), "scale": pytest.approx(np.std(ages), rel=1e-5),
        },
        "pain": {"kind": "category", "categories": ["none", "typical"]},
        "same": {"kind": "number", "missing": False, "mean": 5.0, "scale": 1.0, "fill": 5.0},
    }  # fmt: skip
    assert "column 'same' has the same number in every row" in result.stderr
    assert json.loads(call("describe", messy, *OUT, "--impute", "median", "--json").stdout)["scenario"]["columns"]


def test_a_folder_of_tables_is_a_rehearsal_of_all_sites(messy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sites"
    folder.mkdir()
    head, *rows = MESSY.splitlines()
    for site, part in (("north", rows[:35]), ("south", rows[35:])):
        (folder / f"{site}.csv").write_text("\n".join([head, *part]) + "\n")
    flags = (*OUT, *SMALL, "--impute", "median")
    one, both = (tomllib.loads(call("describe", path, *flags).stdout)["scenario"] for path in (messy, folder))
    assert both["sites"] == ["north", "south"]
    assert {**one, "sites": []} == {**both, "sites": []}
    (tmp_path / "run.toml").write_text(call("describe", folder, *flags).stdout)
    result = call(
        "run", "--config", tmp_path / "run.toml", "--method", "fedavg", "--rounds", "2", "--data-root", folder,
        "--device", "cpu", "--out", tmp_path / "run",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert load_config(tmp_path / "run.toml").scenario.input_shape == (2 + 3 + 1,)


def test_of_a_folder_only_the_named_sites_count(tmp_path: Path) -> None:
    for place, site in enumerate(("north", "south", "west")):
        (tmp_path / f"{site}.csv").write_text("age,label\n" + f"{10 * place},u\n{10 * place + 2},v\n" * 20)
    two = call("describe", tmp_path, "--site", "north", "--site", "west")
    assert tomllib.loads(two.stdout)["scenario"]["sites"] == ["north", "west"]
    assert tomllib.loads(two.stdout)["scenario"]["mean"] == [11.0]
    assert "80 rows at 2 sites" in two.stdout
    one = call("describe", tmp_path, "--site", "south")
    assert tomllib.loads(one.stdout)["scenario"]["mean"] == [11.0]
    assert tomllib.loads(one.stdout)["scenario"]["sites"] == ["south"]
    wrong = call("describe", tmp_path, "--site", "nroth")
    assert (wrong.exit_code, len(wrong.stderr.splitlines())) == (2, 1)
    assert "--site: unknown site 'nroth'; did you mean 'north'? (there are: north, south, west)" in wrong.stderr
    for site in ("north", "west"):  # a folder of one table is one, too
        (tmp_path / f"{site}.csv").unlink()
    assert call("describe", tmp_path).stdout == one.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--drop", "note", "--drop", "when"), "column 'age' has 9 empty cells; say what empty cells count as"),
        (("--impute", "best"), "--impute best: unknown rule 'best'"),
        (("--impute", "pains=mean"), "--impute: unknown column 'pains'; did you mean 'pain'"),
        (("--impute", "mean", "--drop", "note"), "column 'when' has dates; make numbers of them"),
        (("--impute", "mean", "--drop", "when"), "column 'note' has free text or identifiers (more than 100"),
        (
            ("--impute", "mean", "--impute", "pain=mean", "--drop", "note", "--drop", "when"),
            "--impute pain: its cells are names; an empty one has a feature of its own",
        ),
        (("--impute", "mean"), "leave it out with --drop note; m: column 'when' has dates"),
        (("--impute", "mean", "--category", "agee"), "--category: unknown column 'agee'"),
        (
            ("--impute", "sick=mean"),
            "and 'sick' is the column of the label; leave it out, or name another one with --label-column",
        ),
        (
            ("--drop", "pain", "--environment-column", "pain"),
            "--drop is for features, and 'pain' is the column of the environment; leave it out, or name another",
        ),
    ],
)
def test_what_a_messy_table_needs_is_one_sentence(flags: tuple[str, ...], sentence: str, messy: Path) -> None:
    messy.write_text(messy.read_text().replace("?", "some"))
    result = call("describe", messy, "--label-column", "sick", *flags)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_balanced_weights_of_classes_are_announced(tmp_path: Path) -> None:
    """By the rows of all sites, of classes that a site has in few rows by those of the others."""
    for site, (ill, well) in {"a": (30, 50), "b": (4, 120)}.items():
        rows = [f"{n},ill" for n in range(ill)] + [f"{n},well" for n in range(well)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["x,label", *rows]) + "\n")
    result = call("describe", tmp_path, "--class-weights", "balanced")
    assert result.exit_code == 0, result.output
    told = tomllib.loads(result.stdout)["scenario"]
    assert told["labels"] == ["ill", "well"]
    assert told["class_weights"] == pytest.approx([200 / 60, 200 / 340], rel=1e-5)
    assert "class_weights" not in call("describe", tmp_path).stdout
    weights = announced(told).loss_weights
    assert weights == tuple(told["class_weights"])

    np.savez(tmp_path / "a.npz", x=np.zeros((5, 2)), y=np.array([0, 1, 1, 1, 1]))
    told = tomllib.loads(call("describe", tmp_path / "a.npz", "--class-weights", "balanced").stdout)["scenario"]
    assert told["class_weights"] == [2.5, 0.625]


def test_an_identifier_is_pointed_out(tmp_path: Path) -> None:
    """Of each site more than 20 whole numbers, all different, in any order."""
    names, numbers = ("id", "pid", "age", "dose"), np.random.default_rng(0).permutation(10**15 * np.arange(10, 90))
    for site, part in (("a", numbers[:40]), ("b", numbers[40:])):
        rows = [f"{n},{pid},{n % 39 if site == 'a' else n},{n / 4},{n % 2}" for n, pid in enumerate(part.tolist())]
        (tmp_path / f"{site}.csv").write_text("\n".join([",".join([*names, "label"]), *rows]) + "\n")
    result = call("describe", tmp_path)
    assert result.exit_code == 0
    said = {name: f"column '{name}' has another whole number in every row; an identifier" for name in names}
    assert [name for name in names if said[name] in result.stderr] == ["id", "pid"]
    table = (tmp_path / "b.csv").read_text().splitlines()
    (tmp_path / "b.csv").write_text("\n".join(table[:21]) + "\n")
    assert "in every row" not in call("describe", tmp_path).stderr


def test_what_is_wrong_with_a_table_names_its_file(tmp_path: Path) -> None:
    rows = "".join(f"2020-01-{n},{n % 2}\n" for n in range(10, 30))
    for file, name in (("visits.csv", "visits"), ("all my visits.csv", "table")):
        (tmp_path / file).write_text(f"day,label\n{rows}")
        result = call("describe", tmp_path / file)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"perennial: {name}: column 'day' has dates")


def test_names_that_are_spelt_in_several_ways_are_pointed_out_and_not_merged(tmp_path: Path) -> None:
    """Those of few rows, too, which no survey is told of: the tables are on this machine."""
    (tmp_path / "a.csv").write_text("x,ward,label\n" + "1,North,ill\n2,South,well\n" * 20 + "1,South,Ill\n")
    (tmp_path / "b.csv").write_text("x,ward,label\n" + "1,north,ill\n2,South,well\n" * 20)
    both = call("describe", tmp_path)
    assert both.exit_code == 0, both.output
    assert tomllib.loads(both.stdout)["scenario"]["labels"] == ["ill", "well"]
    said = "look like the same one; if so, spell them alike in the tables"
    assert f"classes 'Ill' (a) and 'ill' (a and 1 more) {said}" in both.stderr
    assert f"categories 'North' (a) and 'north' (b) of column 'ward' {said}" in both.stderr
    assert f"classes 'Ill' and 'ill' {said}" in call("describe", tmp_path / "a.csv").stderr
    assert "look like" not in call("describe", tmp_path / "b.csv").stderr
    assert "'ward'" not in call("describe", tmp_path, "--drop", "ward").stderr

    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.array(["1", "0", "01", "0"]))
    assert f"classes '01' and '1' {said}" in call("describe", tmp_path / "a.npz").stderr


def test_truth_values_are_two_classes_from_whatever_format(tmp_path: Path) -> None:
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text("x,label\n" + "1,True\n0,False\n" * 20)
    parquet.write_table(pa.table({"x": [1, 0] * 20, "label": [True, False] * 20}), tmp_path / "c.parquet")
    found = describe(tmp_path)
    assert (found.scenario.labels, found.remarks) == (("False", "True"), [])
    every = [found.scenario.client_data(place, 0, tmp_path).train for place in range(3)]
    assert all(part.y.tolist() == (part.x[:, 0] > 0).long().tolist() for part in every)


def test_a_column_with_one_number_is_0_for_models(tmp_path: Path) -> None:
    """At all sites, though a model sees seven digits of it; and at one of them, though its sums are rounded."""
    rng = np.random.default_rng(0)
    for site in "abc":
        ph = [7.4] * 200 if site == "b" else rng.normal(7.3, 0.1, 200).round(2)
        rows = "".join(f"{number},20240117,1234567890,{'uv'[n % 2]}\n" for n, number in enumerate(ph))
        (tmp_path / f"{site}.csv").write_text(f"ph,day,id,label\n{rows}")
    for per_site in (False, True):
        scenario = describe(tmp_path, per_site=per_site, asked=question(["median"])).scenario
        x = scenario.client_data(1, 0, tmp_path).train.x
        assert x[:, 1:].eq(0).all()
        assert (x[:, 0].abs().max() < 1e-6) == per_site
        column = scenario.columns_of("b")["ph"]
        assert (column.scale == 1.0, column.fill == 7.4) == (per_site, per_site)
    np.savez(tmp_path / "d.npz", x=np.full((50, 2), 20240117), y=np.arange(50) % 2)
    alone = describe(tmp_path / "d.npz").scenario
    assert alone.prepare(torch.full((1, 2), 20240117.0)).eq(0).all()


def test_where_a_site_has_no_frequent_number_those_of_all_sites_count(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "abc":
        cells = rng.normal(37, 0.5, 100)
        texts = [f"{cell}" if site == "c" else f"{cell:.0f}" for cell in cells]
        rows = "".join(f"{'' if n < 5 and site != 'c' else text},{'uv'[n % 2]}\n" for n, text in enumerate(texts))
        (tmp_path / f"{site}.csv").write_text(f"temp,label\n{rows}")
    scenario = describe(tmp_path, per_site=True, asked=question(["most-frequent"])).scenario
    assert {scenario.columns_of(site)["temp"].fill for site in "abc"} == {37.0}


@pytest.mark.parametrize("least", [10, 15, 25])
def test_as_sites_would_tell_it(least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        rows = "".join(f"{'' if n < 5 else age},{'uv'[n % 2]}\n" for n, age in enumerate(rng.gamma(2, 10, 100)))
        (tmp_path / f"{site}.csv").write_text(f"age,label\n{rows}")
    asked = question(["median"], least=least)
    here = describe(tmp_path, asked=asked).scenario
    monkeypatch.setattr(describing, "Respondent", lambda *of: Respondent(*of[:3], least=10))
    assert describe(tmp_path, asked=asked).scenario == here


def test_a_code_for_what_is_unknown_is_pointed_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        pressure, rare = rng.normal(125, 18, 400), rng.random(400) < 0.1
        skewed, counts = rng.lognormal(1, 1, 400), rng.poisson(0.3, 400)
        coded = np.where(rng.random(400) < 0.05, -999, pressure)
        cells = zip(pressure, coded, rare * 1, skewed, counts, rng.integers(2, size=400), strict=True)
        rows = "\n".join(",".join(f"{cell:g}" for cell in row) for row in cells)
        (tmp_path / f"{site}.csv").write_text(f"pressure,coded,rare,skewed,counts,label\n{rows}\n")
    (said,) = describe(tmp_path, quantiles=True).remarks
    assert said.startswith("column 'coded' has cells far from all others: half are between 11")
    assert said.endswith("if a number such as -999 says that nothing is known, empty these cells")
    assert describe(tmp_path, asked=question(["median"])).remarks == [said]


def test_classes_that_measure_something_are_pointed_out(tmp_path: Path) -> None:
    for days, count in ((("1", "2.5"), 2), ([str(n) for n in range(21)], 21), ([str(n) for n in range(20)], 0)):
        rows = "".join(f"{n},{day}\n" for n in range(40) for day in days)
        (tmp_path / "a.csv").write_text(f"x,label\n{rows}")
        said = [remark for remark in describe(tmp_path).remarks if "say --task numbers" in remark]
        assert [remark.split(",")[0] for remark in said] == [f"the classes are {count} numbers"] * bool(count)


def test_a_column_of_another_name_is_found(tmp_path: Path) -> None:
    for site, columns in {"a": "Age,w", "b": "age,w", "c": "age,w", "d": "age"}.items():
        rows = "\n".join(f"{','.join('1' * len(columns.split(',')))},{'uv'[n % 2]}" for n in range(40))
        (tmp_path / f"{site}.csv").write_text(f"{columns},label\n{rows}\n")
    assert describe(tmp_path).left_out == {
        "a": "it has column 'Age', which most sites do not have; did you mean 'age'? (--drop Age leaves the "
        "column out; an empty column of that name where there is none keeps it)",
        "d": "it lacks column 'w', which most sites have (--drop w leaves the column out; an empty column of that "
        "name where there is none keeps it)",
    }
    lacking = (tmp_path / "d.csv").read_text()
    (tmp_path / "d.csv").write_text(lacking.replace("age,", "age,w,").replace("1,", "1,,"))
    assert describe(tmp_path, asked=question(["median"])).left_out.keys() == {"a"}
    (tmp_path / "d.csv").write_text(lacking)
    assert describe(tmp_path, asked=question(drop=["w"])).scenario.sites == ("b", "c", "d")
    with pytest.raises(
        UserError, match=r"; only a has 'Age'; did you mean 'age'\? \(--drop Age leaves the column"
    ):
        describe(tmp_path, ("a", "b"))
    with pytest.raises(UserError, match=r"same columns; only b has 'w' \(--drop w leaves the column out\)"):
        describe(tmp_path, ("b", "d"))


def test_a_column_of_truth_values_has_names_in_every_format(tmp_path: Path) -> None:
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text("smoker,label\n" + "True,u\n,u\nFalse,v\n" * 20)
    smoker = pa.array([True, None, False] * 20)
    for cells in (smoker, smoker.dictionary_encode()):
        parquet.write_table(pa.table({"smoker": cells, "label": ["u", "u", "v"] * 20}), tmp_path / "c.parquet")
        found = describe(tmp_path)
        assert (found.left_out, found.scenario.sites) == ({}, ("a", "b", "c"))
        (column,) = found.scenario.columns.values()
        assert column == CategoryColumn(categories=("False", "True"))
        scenario = found.scenario.model_copy(update={"test_fraction": 0.0, "validation_fraction": 0.0})
        for place in range(3):
            assert scenario.client_data(place, 0, tmp_path).train.x.sum(dim=0).tolist() == [20, 20, 20]


def test_a_target_that_is_a_number_asks_for_its_task(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,stay\n" + "".join(f"1,{n / 4}\n" for n in range(40)))
    told = call("describe", tmp_path, "--label-column", "stay")
    assert told.exit_code == 2
    assert told.stderr == (
        "perennial: a has no class that has 10 rows (column 'stay'); there must be two or more; if it is a "
        "number, such as days, say --task numbers\n"
    )
    (tmp_path / "a.csv").write_text("x,stay\n" + "1,long\n" * 40)
    told = call("describe", tmp_path, "--label-column", "stay")
    assert told.stderr.endswith("has samples of class 'long' alone (column 'stay'); there must be two or more\n")


def test_sites_that_do_not_fit_together(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label\n1,u\n2,v\n")
    other = tmp_path / "b.csv"
    other.write_text("x,label\nlow,u\nhigh,v\n")
    mixed = call("describe", tmp_path, *SMALL)
    assert "column 'x' has numbers in a and text in b" in mixed.stderr
    assert call("describe", tmp_path, *SMALL, "--category", "x").exit_code == 0
    other.write_text("y,label\n1,u\n2,v\n")
    assert "a and b must have the same columns; only a has 'x'" in call("describe", tmp_path, *SMALL).stderr
    other.rename(tmp_path / "a.parquet")
    assert "has two tables of a site 'a'" in call("describe", tmp_path).stderr
    other.write_text("x,label\n")
    (tmp_path / "a.parquet").unlink()
    assert "b.csv has no rows" in call("describe", tmp_path).stderr
    (tmp_path / "a.csv").write_text("x,label\n" + "1,u\n2,v\n" * 20)
    (tmp_path / "c.csv").write_text("x,label\n" + "1,u\n2,v\n" * 20)
    others = call("describe", tmp_path)
    assert others.exit_code == 0
    assert "left out b: b.csv has no rows" in others.stderr
    assert tomllib.loads(others.stdout)["scenario"]["sites"] == ["a", "c"]


# ---------------------------------------------------------------------- tables that people have


def of_two(folder: Path, *rows: str, head: str = "age,label") -> Path:
    """A table with these rows, over and over, of whom every second is ill."""
    lines = [f"{rows[number % len(rows)]},{'ill' if number % 2 else 'well'}" for number in range(60)]
    path = folder / "t.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_rare_environments_and_classes_are_pointed_out_before_a_run_refuses_them(tmp_path: Path) -> None:
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text("x,env,label\n" + "1,day,u\n2,night,v\n" * 20)
    flags = ("--environment-column", "env", "--out", tmp_path / "run.toml")
    assert "of 4 rows is one" not in call("describe", tmp_path, *flags).stderr
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text() + "1,dawn,u\n2,dawn,w\n" * 2)
    told = call("describe", tmp_path, *flags)
    assert told.exit_code == 0
    for what, count, names in (("class (column 'label')", 2, "labels"), ("environment (column 'env')", 4, "env")):
        said = (
            f"the {what} of {count} rows is one that their site has in fewer than 10 rows; if no site has more of"
        )
        assert f"{said} it, it is not among the {names}" in told.stderr
    assert told.stderr.count("cannot take part in a run; describe again with a smaller --at-least, or take") == 2
    run = (
        "run", "--config", tmp_path / "run.toml", "--method", "fedavg", "--rounds", "1", "--data-root", tmp_path,
        "--device", "cpu", "--out", tmp_path / "run",
    )  # fmt: skip
    refused = call(*run)
    assert refused.exit_code == 2
    said = "a.csv: row 41 is of no environment that the server announces (day, night); correct column 'env', take"
    assert said in refused.stderr
    assert "is one that" not in call("describe", tmp_path, *flags, "--at-least", "2").stderr
    assert call(*run).exit_code == 0


def test_numbers_far_from_zero_are_scaled_as_others_are(tmp_path: Path) -> None:
    numbers = [10_000_012.25 + number for number in range(7)]
    path = of_two(tmp_path, *map(str, numbers))
    found = describe(path, asked=question(impute=["median"]))
    (column,) = found.scenario.columns.values()
    features = column.features(number_cells(read(path).x, "age", "t.csv"))  # type: ignore[arg-type]
    assert abs(features.mean()) < 1e-3
    assert features.std() == pytest.approx(1, abs=1e-3)
    assert abs(column.fill - column.mean) < 0.1 * column.scale  # type: ignore[operator, union-attr]
    assert (
        "column 'age' varies by 2 around 1.000002e+07, of which models see 7 digits; subtract" in found.remarks[0]
    )


def test_classes_below_zero_come_first(tmp_path: Path) -> None:
    path = of_two(tmp_path, "1", "2")
    path.write_text(path.read_text().replace("well", "-1").replace("ill", "1"))
    assert describe(path).scenario.labels == ("-1", "1")


def test_tables_in_capitals_count_and_others_are_named(tmp_path: Path) -> None:
    table = of_two(tmp_path, "30", "40", "50").read_bytes()
    (tmp_path / "t.csv").rename(tmp_path / "north.csv")
    (tmp_path / "SOUTH.CSV").write_bytes(table)
    (tmp_path / "va.tsv").write_bytes(table)
    found = describe(tmp_path)
    assert found.scenario.sites == ("SOUTH", "north")
    assert found.left_out == {"va.tsv": "is no .csv or .parquet file; save it as one"}
    assert len(found.scenario.at("SOUTH").client_data(0, 0, tmp_path).train.y)
    for name in ("north.csv", "SOUTH.CSV"):
        (tmp_path / name).unlink()
    with pytest.raises(
        UserError, match=r"has no table that can be read: va.tsv is no .csv or .parquet file; save"
    ):
        describe(tmp_path)


def test_hidden_files_are_no_tables_and_a_name_that_no_site_has_is_to_be_changed(tmp_path: Path) -> None:
    """macOS puts `._north.csv` beside north.csv on other disks."""
    of_two(tmp_path, "30", "40", "50").rename(tmp_path / "north.csv")
    (tmp_path / "._north.csv").write_bytes(b"\0\5\x16\7")
    found = describe(tmp_path)
    assert (found.scenario.sites, found.left_out) == (("north",), {})
    (tmp_path / "süd.csv").write_bytes((tmp_path / "north.csv").read_bytes())
    with pytest.raises(
        UserError,
        match=r"has a table of 'süd', which is no name of a site; rename süd\.csv: take letters \(a to z",
    ):
        describe(tmp_path)


def test_deep_pictures_are_refused(tmp_path: Path) -> None:
    pictures(tmp_path / "pics", (4, 4), "I;16")
    with pytest.raises(
        UserError, match=r"1\.png cannot be read \(it has more than 8 bits for each value; save it"
    ):
        describe(tmp_path / "pics")


def test_a_table_is_not_written_over_by_its_description(table: Path, tmp_path: Path) -> None:
    result = call("describe", table, *FLAGS, "--out", table)
    assert (result.exit_code, table.read_text()) == (2, TABLE)
    assert "t.csv is there and does not end in .toml, so it may be a file of your own" in result.stderr
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    result = call("describe", table, *FLAGS, "--out", tmp_path / "run" / "config.toml")
    assert (result.exit_code, "keeps; give another name" in result.stderr) == (2, True), result.output
    assert "is a folder; name a file, such as" in call("describe", table, *FLAGS, "--out", tmp_path).stderr
    assert "there is no folder" in call("describe", table, *FLAGS, "--out", tmp_path / "no" / "run.toml").stderr
    for _ in range(2):
        assert call("describe", table, *FLAGS, "--out", tmp_path / "run.toml").exit_code == 0
