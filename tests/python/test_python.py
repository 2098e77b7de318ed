"""`import perennial`: runs, studies, arrays in memory; what is wrong with them is one sentence."""

import inspect
import json
import re
import subprocess
import sys
import warnings
from datetime import datetime
from pathlib import Path
from shutil import rmtree
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from messy_tables import hospitals
from PIL import Image
from plugin_packages import METHOD, unloaded, write
from torch import nn
from typer.testing import CliRunner

import perennial
from perennial import InMemory, Progress, Result, UserError, from_arrays, from_partitions
from perennial.common.config import load_config
from perennial.common.data.datasets import load
from perennial.common.data.scenarios.arrays import FOLDER
from perennial.common.data.scenarios.label_skew import Digits3Class
from perennial.common.utils.files import load_records, load_tensors, save_records
from perennial.server.cli.main import app
from perennial.server.papers.recipes import recipe_config
from perennial.server.report.page import report
from perennial.server.run.folder import RunFolder
from perennial.server.runs import vacant
from perennial.server.study.run_names import run_name

FEW = {"evaluate_every": 2, "checkpoint_every": 2, "model.hidden": [8]}


def samples(seed: int, n: int = 40, environments: tuple[str, ...] = ("hot", "cold")) -> tuple[Any, Any, Any]:
    """Five numbers, of which the first says the class, and the last does so in one of the environments."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 5)), np.arange(n) // 2 % 2
    x[:, 0] += 2 * y
    x[:, 4] += np.where(np.arange(n) % 2, 3 * y, 0)
    return x, y, np.array(environments)[np.arange(n) % len(environments)]


@pytest.fixture(scope="module")
def scenario() -> InMemory:
    clients = {"north": samples(1), "east": samples(2, 30)}
    return from_arrays(clients, {"new": samples(3, 20)[:2], "own": {"north": samples(4, 16)[:2]}})


@pytest.fixture(scope="module")
def ditto(scenario: InMemory, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return perennial.run("ditto", scenario, rounds=4, settings=FEW, out=tmp_path_factory.mktemp("run") / "ditto")


# ---------------------------------------------------------------------- importing


def test_importing_the_package_imports_nothing_else() -> None:
    program = "import sys; before = set(sys.modules); import perennial; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "perennial.server.runs" not in done.stdout
    assert not {"torch", "pydantic", "numpy", "flwr"} & set(done.stdout.replace("'", "").strip("[]\n").split(", "))


def test_every_name_of_the_package_is_there_and_documented() -> None:
    for name in perennial.__all__:
        assert inspect.getdoc(getattr(perennial, name)), name
        assert name in dir(perennial)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        perennial.nothing  # noqa: B018


# ---------------------------------------------------------------------- a run


def test_a_run_and_the_command_give_the_same_numbers(tmp_path: Path) -> None:
    told: list[Progress] = []
    settings = {"scenario.clients": 2, "evaluate_every": 2, "learning_rate": np.float64(0.1)}
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = perennial.run(
            "fedavg",
            "colored-digits",
            rounds=2,
            seed=3,
            settings=settings,
            out=tmp_path / "one",
            watch=told.append,
        )
        assert torch.get_num_threads() == 2  # the caller's own
    finally:
        torch.set_num_threads(threads)
    assert [progress.round for progress in told] == [0, 1, 2]
    command = ["run", "--method", "fedavg", "--scenario", "colored-digits", "--rounds", "2", "--seed", "3"]
    for setting in ("scenario.clients=2", "evaluate_every=2", "learning_rate=0.1"):
        command += ["--set", setting]
    typed = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "two"), "--json"])
    assert typed.exit_code == 0, typed.output
    assert json.loads(typed.stdout)["models"] == result.summary["models"]
    assert (tmp_path / "one" / "config.toml").read_text() == (tmp_path / "two" / "config.toml").read_text()
    assert (tmp_path / "one" / "metrics.jsonl").read_text() == (tmp_path / "two" / "metrics.jsonl").read_text()


def test_a_run_without_arguments_is_the_first_command(tmp_path: Path) -> None:
    result = perennial.run(rounds=1, settings={"scenario.clients": 2}, out=tmp_path / "run")
    assert result.config == recipe_config("demo/fedsdr", {"rounds": 1}, ["scenario.clients=2"])[0]


def test_runs_of_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("perennial.server.run.folder.default_out", lambda _: "runs/now")
    config = load_config(options={"method": "fedavg", "scenario": "colored-digits"})
    for name in ("now", "now-2", "now-3"):
        path = vacant(config, None)
        assert path == Path("runs") / name
        path.mkdir(parents=True)


def test_tables_are_what_the_summary_says(ditto: Result) -> None:
    found = ditto.summary["models"]["personal"]["final"]
    rows = [row for row in ditto.accuracy if (row["model"], row["selection"]) == ("personal", "final")]
    assert {row["environment"]: row["accuracy"] for row in rows} == found["accuracy"]
    assert found["accuracy"].keys() == {"new", "own"}
    (overall,) = (row for row in ditto.overall if (row["model"], row["selection"]) == ("personal", "final"))
    assert (overall["round"], overall["worst"], overall["held_out"]) == (4, found["worst"], found["validation"])
    own = [row for row in ditto.clients if (row["model"], row["selection"]) == ("personal", "final")]
    assert [(row["client"], row["environment"]) for row in own] == [
        ("east", "new"), ("north", "new"), ("north", "own")
    ]  # fmt: skip
    last = [row for row in ditto.history if row["round"] == 4 and row["model"] == "personal"]
    assert {row["environment"]: row["accuracy"] for row in last if row["split"] == "test"} == found["accuracy"]
    assert f"worst {100 * found['worst']:.2f} %" in repr(ditto)
    assert ditto.overall._repr_html_().count("<tr>") == 1 + len(ditto.overall)
    head, *lines = str(ditto.overall).splitlines()
    assert head.split()[:3] == ["model", "selection", "round"]
    assert len(lines) == len(ditto.overall)


def test_a_table_is_a_frame_where_pandas_is_there(ditto: Result) -> None:
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match="needs pandas"):
            ditto.accuracy.frame()
    else:
        frame = ditto.accuracy.frame()
        assert list(frame.columns) == ["model", "selection", "round", "environment", "accuracy"]
        assert frame["accuracy"].tolist() == [row["accuracy"] for row in ditto.accuracy]


def test_plots_have_a_line_for_each_row_of_numbers(ditto: Result) -> None:
    matplotlib.use("Agg")
    axes = ditto.plot()
    picked = {(model, own["round"]) for model, by in ditto.summary["models"].items() for own in by.values()}
    assert len(axes.get_lines()) == len(picked), "lines upon lines"
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    found = ditto.summary["models"]["global"]["final"]["accuracy"]
    assert list(lines["Ditto: global, final (round 4)"]) == [100 * value for value in found.values()]
    assert len(ditto.plot_history(axes).get_lines()) == 4 + 2 * 3  # held-out, average and worst of two models
    both = perennial.plot([ditto, ditto])
    named = [str(line.get_label()) for line in both.get_lines()]
    assert len(named) == 2 * len(picked)
    assert all(label.startswith(f"Ditto, seed 0, {ditto.folder.name}: ") for label in named)
    assert both.get_title() == f"{ditto.config.scenario.name}, seed {ditto.config.seed}"
    with pytest.raises(UserError, match=r"results: there is none to draw"):
        perennial.plot([])
    matplotlib.pyplot.close("all")


def test_a_run_is_loaded_and_goes_on_from_its_data(ditto: Result, scenario: InMemory, tmp_path: Path) -> None:
    short = perennial.run("ditto", scenario, rounds=2, settings=FEW, out=tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 4"))
    resumed = perennial.resume(short.folder)
    assert resumed.accuracy == ditto.accuracy == perennial.load(ditto.folder).accuracy
    with pytest.raises(UserError, match="has ended: all 4 rounds are done"):
        perennial.resume(short.folder)
    rmtree(short.folder / "checkpoint")  # as at another desk, where there is none
    (short.folder / "server.txt").write_text("/elsewhere")
    with pytest.raises(UserError, match="has ended: all 4 rounds are done"):
        perennial.resume(short.folder)
    assert (short.folder / "summary.json").exists()
    with pytest.raises(UserError, match="is not a run folder"):
        perennial.load(tmp_path)


def test_a_method_of_ones_own_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERENNIAL_PLUGINS", "")
    write(tmp_path, "my_method", METHOD)
    with unloaded():
        with pytest.raises(UserError, match="unknown method 'my-prox'"):
            perennial.run("my-prox", "colored-digits", rounds=1)
        perennial.plugin("my_method")
        result = perennial.run("my-prox", "colored-digits", rounds=1, settings=FEW, out="run")
        assert result.config.plugins == ("my_method",)
        assert perennial.compare(["my-prox"], "colored-digits", seeds=1, rounds=1, out="pool").row(
            "MyProx", "final"
        )
    with pytest.raises(UserError, match=r"plug-in 3 is not possible; write a module's name"):
        perennial.plugin(3)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize(
    "method",
    ["ditto", "fedsdr", "apfl", "fedrod", "fedsr", "ifca", "per-fedavg", "fedpac", "cgpfl", "v-fl-games"],
)
def test_a_model_has_the_accuracy_that_the_run_says(method: str, scenario: InMemory, tmp_path: Path) -> None:
    groups = {"ifca": {"clusters": 2}, "cgpfl": {"contexts": 2}}.get(method, {})
    result = perennial.run(method, scenario, rounds=2, settings={**FEW, **groups}, out=tmp_path / "run")
    config = result.config
    for number, client in enumerate(config.scenario.client_ids):
        data = config.scenario.client_data(number, config.seed, config.data_folder)
        for name in config.method.evaluates:
            model = result.model(name, client=client)
            found = {row["environment"]: row["accuracy"] for row in result.clients
                     if (row["model"], row["selection"], row["client"]) == (name, "final", client)}  # fmt: skip
            right = {
                name: float((model(part.x).argmax(dim=1) == part.y).double().mean())
                for name, part in data.test.items()
            }
            assert right == pytest.approx(found, abs=1e-12), (name, client)


def test_a_model_is_an_ordinary_module(ditto: Result) -> None:
    model = ditto.model(client="north")
    assert isinstance(model, nn.Module)
    assert not model.training
    shapes = {name: tuple(own.shape) for name, own in model.named_parameters()}
    assert shapes == {
        "featurizer.1.weight": (8, 5),
        "featurizer.1.bias": (8,),
        "classifier.weight": (2, 8),
        "classifier.bias": (2,),
    }
    saved = load_tensors(ditto.folder / "models" / "global.safetensors")
    assert all(torch.equal(own, saved[name]) for name, own in ditto.model("global").state_dict().items())
    model(torch.zeros(1, 5)).sum().backward()
    assert model.classifier.weight.grad is not None
    with pytest.raises(UserError, match="each client has a personal model of its own"):
        ditto.model("personal")
    with pytest.raises(UserError, match="unknown client 'south'"):
        ditto.model("personal", client="south")
    with pytest.raises(UserError, match="unknown model 'best'"):
        ditto.model("best")


def test_predictions_of_raw_rows_are_those_that_the_run_counted(ditto: Result, scenario: InMemory) -> None:
    x, y, _ = samples(4, 16)  # north's own test samples
    found = {row["client"]: row["accuracy"] for row in ditto.clients
             if (row["model"], row["selection"], row["environment"]) == ("personal", "final", "own")}  # fmt: skip
    assert np.mean(ditto.predict(x, client="north") == y) == found["north"]
    assert ditto.predict_proba(x, "global").sum(axis=1) == pytest.approx(1)
    assert ditto.predict_proba(x.tolist(), "global").argmax(axis=1).tolist() == ditto.predict(x, "global").tolist()
    for wrong, sentence in (
        (x[:, :4], "x must be numbers of shape n x 5, not float64 of shape 16x4"),
        (x[0], "x must be numbers of shape n x 5, not float64 of shape 5"),
        (x[:0], "x must be numbers of shape n x 5, not float64 of shape 0x5"),
        ("new.csv", "x must be numbers of shape n x 5, not <U7"),
        (np.where(x == x[3, 1], np.nan, x), "sample 3 has in number 1 what is no finite number"),
    ):
        with pytest.raises(UserError, match=sentence):
            ditto.predict(wrong, "global")


def test_predictions_of_pictures_are_those_that_the_run_counted_where_a_scenario_standardises_them(
    tmp_path: Path,
) -> None:
    result = perennial.run("fedavg", "digits-3class", rounds=5, out=tmp_path / "run")
    raw, scenario = load("digits"), result.config.scenario
    assert isinstance(scenario, Digits3Class)
    own = scenario.shares(0, raw)[3].test
    found = {row["client"]: row["accuracy"] for row in result.clients if row["selection"] == "final"}
    pictures = raw.images[own].view(-1, 1, 8, 8)
    for x in (pictures, pictures.float() / 255 if pictures.dtype == torch.uint8 else pictures):
        right = result.predict(x.numpy()) == raw.labels[own].numpy()
        assert np.mean(right) == pytest.approx(found["client-03"])


def test_a_column_of_a_frame_that_is_no_column_of_numbers_is_named() -> None:
    day = datetime(2020, 2, 1)
    for seen, kind in ((["M", "F"] * 4, "str"), ([None, day] * 4, "datetime")):
        cells = np.array([*zip(X[:, 0], seen, strict=True)], object)
        with pytest.raises(UserError, match=rf"^a: column 'seen' of x must have numbers, not {kind}; make num"):
            from_arrays({"a": (Frame(cells, ["age", "seen"]), Y)})
    with pytest.raises(UserError, match=r"^a: column 'sex' of x must have numbers, not str; make"):
        from_arrays({"a": (Frame(np.array([["M", "old"]] * 8, object), ["sex", "age"]), Y)})
    cells = np.array([[1, 2]] * 8, object)
    cells[3, 1] = None
    with pytest.raises(UserError, match=r"^a: column 'size' of x is empty for sample 3; fill it in, or leave the"):
        from_arrays({"a": (Frame(cells, ["age", "size"]), Y)})


def test_bytes_of_a_frame_with_names_are_numbers_like_others(tmp_path: Path) -> None:
    ages = np.arange(8, dtype=np.uint8)[:, None] * 20
    pixels, numbers = from_arrays({"a": (ages, Y)}), from_arrays({"a": (Frame(ages, ["age"]), Y)})
    found = [own.scenario.client_data(0, 0, Path(own.save(tmp_path))).train.x for own in (pixels, numbers)]
    assert torch.equal(found[0] * 255, found[1])


def test_classes_that_a_site_alone_has_are_pointed_out() -> None:
    with pytest.warns(
        UserWarning, match=r"y: b shares no class with any other site \(0, 1, elsewhere no, yes\); if"
    ):
        from_arrays({"a": (X, ["yes", "no"] * 4), "b": (X, ["1", "0"] * 4), "c": (X, ["yes", "no"] * 4)})
    with warnings.catch_warnings(action="error"):
        from_arrays(
            {"a": (X, [0, 1] * 4), "b": (X, [2, 3] * 4)}
        )  # numbers, as of digits that each site has some of


def test_columns_of_a_frame_go_by_their_names(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    x, y, _ = samples(1)
    frame = pandas.DataFrame(x, columns=["a", "b", "c", "d", "e"], index=range(7, 47))
    made = from_arrays({"north": (frame, y + 3), "east": (frame, y + 3)})
    assert made.scenario.column_names == ("a", "b", "c", "d", "e")
    result = perennial.run("fedavg", made, rounds=2, settings=FEW, out=tmp_path / "run")
    found = result.predict_proba(frame)
    assert np.array_equal(result.predict_proba(x), found)
    assert np.array_equal(result.predict_proba(frame[["e", "c", "a", "d", "b"]].assign(more=1)), found)
    assert set(result.predict(frame)) <= {3, 4}
    with pytest.raises(
        UserError, match=r"x has no column 'b'; a model of this run takes \['a', 'b', 'c', 'd', 'e'\]"
    ):
        result.predict(frame.drop(columns="b"))
    with pytest.raises(UserError, match="x: sample 2 has in column 'd' what is no finite number"):
        result.predict(frame.replace(frame["d"].iloc[2], np.nan))


def without_va(folder: Path, *how: str) -> tuple[perennial.Result, float]:
    """A run on the hospitals there, described as asked, in which one trains nothing; and its accuracy."""
    described = [
        "describe",
        str(folder / "hospitals"),
        "--impute",
        "median",
        *how,
        "--out",
        str(folder / "run.toml"),
    ]
    made = CliRunner().invoke(app, described)
    assert made.exit_code == 0, made.output
    result = perennial.run(
        "fedavg",
        config=folder / "run.toml",
        data_root=folder / "hospitals",
        rounds=2,
        settings={"test_sites": ["va"]},
        out=folder / "run",
    )
    (counted,) = (
        row["accuracy"] for row in result.clients if row["client"] == "va" and row["selection"] == "final"
    )
    return result, counted


def test_predictions_of_messy_rows_are_those_that_the_run_counted(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    hospitals(tmp_path / "hospitals")
    result, counted = without_va(tmp_path)
    rows = pandas.read_csv(tmp_path / "hospitals" / "va.csv")
    assert np.mean(result.predict(rows) == rows["label"]) == counted
    texts = rows.astype({"age": object})
    texts.loc[3, "age"] = "old"
    for wrong, sentence in (
        (
            rows.drop(columns="thal"),
            "x has no column 'thal'; a model of this run takes .'age', 'pressure', 'pain', 'thal'.$",
        ),
        (rows.to_numpy(), "x must be a pandas .* the columns .'age', 'pressure', 'pain', 'thal'., not ndarray"),
        (texts, "age"),
    ):
        with pytest.raises(UserError, match=sentence):
            result.predict(wrong)


@pytest.mark.slow
def test_rows_are_scaled_as_their_sites_where_each_has_its_own_scale(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    hospitals(tmp_path / "hospitals")
    rows = pandas.read_csv(tmp_path / "hospitals" / "va.csv")
    rows["pressure"] *= 18  # in another unit
    rows.to_csv(tmp_path / "hospitals" / "va.csv", index=False)
    result, counted = without_va(tmp_path, "--scope", "site")
    assert np.mean(result.predict(rows, client="va") == rows["label"]) == counted
    with pytest.raises(UserError, match=r"scaled by its own .*; say whose, such as with client='cleveland'"):
        result.predict(rows)
    with pytest.raises(UserError, match="unknown client 'elsewhere'"):
        result.predict(rows, client="elsewhere")
    # What other programs take has that scale inside.
    for form, file in (("torch", tmp_path / "m.safetensors"), ("onnx", tmp_path / "m.onnx")):
        if form == "onnx":
            pytest.importorskip("onnxruntime", reason="needs the extra perennial[onnx]")
        export = ["export", str(tmp_path / "run"), "--format", form, "--out", str(file)]
        refused = CliRunner().invoke(app, export)
        assert (refused.exit_code, "--client cleveland" in refused.output, file.exists()) == (2, True, False)
        assert CliRunner().invoke(app, [*export, "--client", "va"]).exit_code == 0


def test_a_module_that_has_changed_is_warned_of(
    scenario: InMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "net_that_changes.py"
    file.write_text(
        "from torch import nn\n\n"
        "def make(classes: int) -> nn.Module:\n"
        "    return nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    result = perennial.run("fedavg", scenario, rounds=1, settings={"model.name": "net_that_changes:make"})
    assert result.model()
    file.write_text(file.read_text().replace("ReLU", "Tanh"))
    with pytest.warns(UserWarning, match="module net_that_changes changed since the run began, so the model may"):
        result.model()
    words = [str(result.folder), "--format", "torch", "--out", "model.safetensors"]
    said = CliRunner().invoke(app, ["export", *words]).stderr
    assert "module net_that_changes changed since the run began; the file may answer otherwise" in said


def test_a_module_that_python_finds_elsewhere_is_an_input_too(
    scenario: InMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of an installed package, which no variable names."""
    (tmp_path / "packages").mkdir()
    file = tmp_path / "packages" / "net_elsewhere.py"
    file.write_text(
        "from torch import nn\n\n\ndef make(classes: int) -> nn.Module:\n    return nn.Linear(5, classes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    config = load_config(options={"method": "fedavg", "scenario": "digits-3class", "model": "net_elsewhere:make"})
    before = run_name(config)
    file.write_text(file.read_text() + "\n")
    assert run_name(config) != before


def test_a_run_is_found_from_another_folder(
    scenario: InMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = perennial.run("fedavg", scenario, rounds=1, out="here")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    assert len(result.history)
    assert perennial.load(result.folder).overall == result.overall


# ---------------------------------------------------------------------- studies


def test_replies_that_were_left_out_are_told_by_studies(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    parts = {name: (generator.normal(size=(30, 4)), np.arange(30) % 2) for name in ("a", "b", "c")}
    parts["c"] = (parts["c"][0] * 1e37, parts["c"][1])
    found = perennial.compare(["ditto"], perennial.from_arrays(parts), seeds=1, rounds=2, out=tmp_path)
    (told,) = (trouble for trouble in found.troubles if trouble.startswith("c: replies left out in "))
    assert "such as 2 in " in told


def test_a_search_and_a_comparison_of_arrays(scenario: InMemory, tmp_path: Path) -> None:
    found = perennial.tune("ditto", scenario, 2, rounds=2, settings=FEW, out=tmp_path, select="held-out")
    assert [row["trial"] for row in found.table] == [0, 1]
    assert found.chosen is not None
    assert found.result.folder == found.chosen.path
    assert [file.suffix for file in found.files] == [".toml", ".svg"]
    assert found.settings.keys() >= {"learning_rate", "proximity"}
    assert repr(found) == f"<Search of 2 trials: {'; '.join(found.why)}>"
    again = perennial.sweep("ditto", scenario, 2, rounds=2, settings=FEW, out=tmp_path, select="held-out")
    assert again.table == found.table
    with pytest.raises(UserError, match="has no checkpoint"):
        found.result.model(client="north")

    compared = perennial.compare(
        ["ditto"], scenario, seeds=2, rounds=2, settings=FEW, out=tmp_path, select="held-out"
    )
    methods = list(dict.fromkeys(row["method"] for row in compared.table))
    assert methods == ["Ditto", "FedAvg", "Local", "Constant"]
    assert repr(compared).startswith("<Comparison of Ditto, FedAvg, Local, Constant on arrays, 2 rounds, 2 seeds")
    row = compared.row("Ditto", "final")
    assert row is not None
    (worst,) = (
        own for own in compared.table
        if (own["method"], own["selection"], own["measure"]) == ("Ditto", "final", "worst")
    )  # fmt: skip
    assert (worst["mean"], worst["seeds"]) == (row.measures["worst"].mean, 2)
    assert len(list((tmp_path / FOLDER).iterdir())) == 3  # once for all runs


def test_numbers_of_a_study_may_be_numpys(scenario: InMemory, tmp_path: Path) -> None:
    one, two = np.int64(1), np.int64(2)
    compared = perennial.compare(
        ["fedavg"], scenario, seeds=one, trials=two, trial_rounds=one, rounds=2, settings=FEW, out=tmp_path
    )  # type: ignore[arg-type]
    assert (compared.seeds, compared.trials, compared.trial_rounds) == (1, 2, 1)


def test_a_comparison_without_test_samples_is_one_sentence(tmp_path: Path) -> None:
    untested = from_arrays({"a": (X, Y), "b": (X, Y)}, test_fraction=0.0)
    with pytest.raises(UserError, match="no client of arrays has test samples with seed 0, so there is"):
        perennial.compare(["ditto"], untested, seeds=1, rounds=1, settings=FEW, out=tmp_path)


def test_a_search_without_test_samples_has_held_out_numbers_alone(tmp_path: Path) -> None:
    untested = from_arrays({"a": (X, Y), "b": (X, Y)}, test_fraction=0.0)
    found = perennial.tune("ditto", untested, 2, select="held-out", rounds=1, settings=FEW, out=tmp_path)
    assert [(row["worst"], row["trouble"]) for row in found.table] == [(None, ""), (None, "")]
    assert all(0 <= row["held-out"] <= 1 for row in found.table)
    page, skipped = report([tmp_path], oracle=True)
    assert skipped == []
    assert "<figcaption>" not in page  # one round is no curve
    assert "held-out training" in page
    with pytest.raises(UserError, match="no client has test data"):
        found.result.plot()


@pytest.mark.slow
def test_a_script_that_lacks_its_main_line_is_told_so(tmp_path: Path) -> None:
    study = 'perennial.sweep("fedavg", "colored-digits", 2, rounds=1, select="held-out", jobs=2)'
    (tmp_path / "script.py").write_text(f"import perennial\n{study}\n")
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "no line `if __name__ == '__main__':` around the call?" in done.stderr


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: perennial.run("fedavgg", "colored-digits"), "unknown method 'fedavgg'; did you mean 'fedavg'"),
        (lambda: perennial.run("fedavg", "digits"), "unknown scenario 'digits'"),
        (
            lambda: perennial.run("fedavg", {"a": (X, Y)}),
            "what perennial.from_arrays makes of your data, not dict",
        ),
        (
            lambda: perennial.compare(["fedavg"], (X, Y)),
            "scenario: give a name, or what perennial.from_arrays makes",
        ),
        (lambda: perennial.run(settings={"rate": 1}), "unknown setting 'rate'"),
        (
            lambda: perennial.run(settings="learning_rate=0.1"),
            "settings: 'learning_rate=0.1' is not possible; give a",
        ),
        (
            lambda: perennial.run(settings=None),
            "settings: None is not possible; give a dict, or a list of key=value",
        ),
        (
            lambda: perennial.run(settings=[("learning_rate", 0.1)]),
            "settings: ('learning_rate', 0.1) is not possible in a list; write key=value, or give a dict",
        ),
        (
            lambda: perennial.run("fedavg", from_arrays({"a": (X, Y), "b": (X, Y)}), track="comet"),
            "track: unknown tracker 'comet' (there are: mlflow, tensorboard, wandb)",
        ),
        (
            lambda: perennial.run(settings={"learning_rate": None}),
            "settings: learning_rate = None is not possible",
        ),
        (
            lambda: perennial.run(settings={"model": {"hidden": 3}}),
            "settings: model = {'hidden': 3} is not possible",
        ),
        (lambda: perennial.run("fedavg", recipe="demo/fedpin"), "is not possible with --method fedavg"),
        (lambda: perennial.sweep("fedavg", "colored-digits", 0), "trials: 0 is not possible"),
        (lambda: perennial.tune("fedavg", "colored-digits", 1), "trials: 1 is not possible"),
        (lambda: perennial.compare(["fedavg"], "colored-digits", seeds=0), "seeds: 0 is not possible"),
        (
            lambda: perennial.compare(["fedavg"], "colored-digits", seeds=[0, 1]),  # type: ignore[arg-type]
            "seeds: [0, 1] is not possible; it must be a whole number, at least 1",
        ),
        (
            lambda: perennial.compare({"ditto": {"proximity": 1}}, "colored-digits"),
            "methods: {'ditto': {'proximity': 1}} is not possible; give a list of names",
        ),
        (lambda: perennial.sweep("fedavg", "colored-digits", 2, jobs=0), "jobs: 0 is not possible"),
        (lambda: perennial.leave_one_site_out(["fedavg"], "rc-digits", seeds=0), "seeds: 0 is not possible"),
        (
            lambda: perennial.run(
                "fedavg",
                from_arrays({"a": (X, Y), "b": (X, Y)}, {"later": (X, Y)}),
                settings={"test_sites": ["a"]},
            ),
            "test_sites: a is not possible with arrays that are tested with later, not with each site's own",
        ),
        (
            lambda: perennial.leave_one_site_out(["fedavg"], "rc-digits", adapt=-1),
            "adapt: -1 is not possible; it must be",
        ),
        (
            lambda: perennial.sweep("fedavg", "colored-digits", 2, select="test"),
            "select: unknown selection 'test'",
        ),
        (lambda: perennial.compare(["fedavg"], "colored-digits", seeds=10**30), "at least 1, and at most 10000"),
        (lambda: perennial.compare(None, "colored-digits"), "methods: None is not possible; give a list of"),  # type: ignore[arg-type]
        (lambda: perennial.compare([3], "colored-digits"), "methods: [3] is not possible; give a list of names"),  # type: ignore[list-item]
        (lambda: perennial.compare(["references"], "colored-digits"), "unknown method 'references'"),
        (lambda: perennial.compare(["fedavg"], "colored-digits", out=None), "out: None is not possible; give a"),  # type: ignore[arg-type]
        (lambda: perennial.run(out="a\0b"), r"out: 'a\x00b' is no path; it must have letters"),
        (lambda: perennial.run(out="\ud800"), r"out: '\ud800' is no path; it must have letters"),
        (lambda: perennial.run(out=""), "out: '' is no path; it must have letters"),
        (lambda: perennial.run(out="n" * 300), "is too long for a path; a name has 255 bytes at most"),
        (lambda: perennial.run(out=b"one"), "out: b'one' is not possible; give a path, as a text or a"),  # type: ignore[arg-type]
        (lambda: perennial.run(config=3), "config: 3 is not possible; give a path"),  # type: ignore[arg-type]
        (lambda: perennial.run(data_root="a\0b"), r"data_root: 'a\x00b' is no path"),
        (lambda: perennial.run(recipe=""), "recipe: '' is not possible; give a name, such as 'demo/fedsdr'"),
        (lambda: perennial.run(recipe=3), "recipe: 3 is not possible; give a name"),  # type: ignore[arg-type]
        (
            lambda: perennial.run("fedavg", "colored-digits", rounds=2, settings={"rounds": 1}),
            "rounds: 2 is given, and 'rounds=1' as a setting; give it once",
        ),
        (
            lambda: perennial.run(seed=1, settings=["seed = 2"]),
            "seed: 1 is given, and 'seed = 2' as a setting; give it once",
        ),
        (
            lambda: perennial.compare(["fedavg"], "colored-digits", rounds=2, settings=["rounds=1"]),
            "rounds: 2 is given, and 'rounds=1' as a setting; give it once",
        ),
        (lambda: perennial.load(3), "folder: 3 is not possible; give a path"),  # type: ignore[arg-type]
        (lambda: perennial.plugin(Path("h")), "is not possible; write a module's name, such as my_method"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_one_sentence(
    call: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        call()
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- arrays


def test_arrays_become_what_clients_have(tmp_path: Path) -> None:
    pixels = np.arange(2 * 4 * 1 * 3 * 3, dtype=np.uint8).reshape(2, 4, 1, 3, 3)
    said = (
        "bytes .uint8., as in a, are divided by 255, and the numbers in test 'far' of b, up to 53, are not; give"
    )
    with pytest.warns(UserWarning, match=said):
        made = from_arrays(
            {"b": (pixels[0], ["cat", "dog", "cat", "dog"], [10, 9, 10, 9]),
             "a": (torch.from_numpy(pixels[1]), np.array(["dog", "emu"] * 2), torch.tensor([9, 9, 10, 10]))},
            {"new": (pixels[1], ["dog"] * 4), "far": {"b": (pixels[1, :2].tolist(), ["emu", "cat"])}},
            validation_fraction=0.0,
        )  # fmt: skip
    scenario = made.scenario
    assert (scenario.client_ids, scenario.class_names) == (("a", "b"), ("cat", "dog", "emu"))
    assert (scenario.train_environments, scenario.test_environments) == (("9", "10"), ("new", "far"))
    assert (scenario.input_shape, scenario.model) == ((1, 3, 3), {"name": "cnn-small"})
    root = Path(made.save(tmp_path))
    data = scenario.client_data(1, 0, root)
    order = torch.argsort(data.train.x[:, 0, 0, 0])
    assert torch.equal(data.train.x[order], torch.from_numpy(pixels[0]).float() / 255)
    assert data.train.y[order].tolist() == [0, 1, 0, 1]
    assert data.train.environment[order].tolist() == [1, 0, 1, 0]
    assert data.test["new"].y.tolist() == [1] * 4
    assert data.test["far"].y.tolist() == [2, 0]
    assert torch.equal(data.test["far"].x, torch.from_numpy(pixels[1, :2]).float())  # a list has no bytes
    assert scenario.client_data(0, 0, root).test.keys() == {"new"}
    again = load_config(options={"scenario": json.loads(scenario.model_dump_json())})
    assert again.scenario == scenario


def test_scenarios_in_memory_are_told_apart(scenario: InMemory) -> None:
    other = from_arrays({"a": (X, Y), "b": (X, Y)})
    assert scenario != other
    assert len({scenario, other, scenario}) == 2


def test_numbers_come_in_many_types() -> None:
    plain = from_arrays({"a": (X, Y)}).scenario
    objects = np.column_stack([X.astype(object), X[:, 0] > 0])  # as pandas has truth values
    numbers = np.column_stack([X, X[:, 0] > 0])
    assert from_arrays({"a": (objects, Y.astype(object))}).scenario == from_arrays({"a": (numbers, Y)}).scenario
    assert from_arrays({"a": (X, Y > 0)}).scenario == from_arrays({"a": (X, list(Y > 0))}).scenario == plain
    large = from_arrays({"a": (X, np.array([0, 2**64 - 1] * 4, np.uint64), ["--5", "-5"] * 4)}).scenario
    assert (large.labels, large.environments) == (("0", "18446744073709551615"), ("-5", "--5"))


def test_classes_that_are_numbers_are_those_of_y() -> None:
    def found(y: Any, classes: Any) -> tuple[tuple[str, ...], list[int]]:
        made = from_arrays({"a": (X, y)}, classes=classes)
        return made.scenario.labels, made.parts[made.scenario.parts[0]]["train"]["y"].tolist()

    y = Y.tolist()
    assert found(Y + 1, [1, 2, 3]) == (("1", "2", "3"), y)
    assert found(Y, np.array([1, 0])) == (("1", "0"), [1 - label for label in y])
    assert found(Y > 0, [True, False]) == (("True", "False"), [1 - label for label in y])
    assert found(Y, np.array(["1", "0"])) == (("1", "0"), y)  # names of the classes 0 and 1
    assert found([str(label) for label in y], [1, 0]) == (("1", "0"), [1 - label for label in y])


def test_names_that_are_spelt_in_several_ways_are_warned_of() -> None:
    y = ["1", "0", "1.0", "0"]
    with pytest.warns(UserWarning, match="look like the same name; if so, spell them alike") as told:
        made = from_arrays({"a": (X[:4], y, ["u", "U", "u", "u"]), "b": (X[:4], y, "u")})
    assert made.scenario.class_names == ("0", "1", "1.0")  # nothing is merged
    assert [str(one.message).split(" look")[0] for one in told] == ["y: '1' and '1.0'", "environment: 'U' and 'u'"]
    assert from_arrays({"a": (X[:4], y)}, classes=["0", "1", "1.0"])  # somebody has named them


def test_pictures_whose_numbers_are_beyond_1_are_warned_of() -> None:
    """A model of them would see picture files that are served in other units than in training."""
    x = np.full((4, 1, 3, 3), 255.0)
    with pytest.warns(UserWarning, match="as in a, go up to 255 and stay so, but picture files that"):
        from_arrays({"a": (x, [0, 1] * 2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_arrays({"a": (x / 255, [0, 1] * 2)})
        from_arrays({"a": (x.astype(np.uint8), [0, 1] * 2)})


def test_channels_that_are_last_are_warned_of() -> None:
    with pytest.warns(
        UserWarning, match="a sample has shape 5x5x3, and pictures are channels x height x width; if"
    ):
        from_arrays({"a": (np.zeros((8, 5, 5, 3)), Y)})
    from_arrays({"a": (np.zeros((8, 3, 5, 5)), Y)})
    from_arrays({"a": (np.zeros((8, 1, 28, 3)), Y)})


def test_without_test_data_a_part_of_each_environment_is_for_testing(tmp_path: Path) -> None:
    made = from_arrays({"a": samples(1)[:2], "b": samples(2)[:2]}, classes=["no", "yes"], test_fraction=0.25)
    assert made.scenario.environments == made.scenario.test_environments == ("all",)
    assert made.scenario.class_names == ("no", "yes")
    data = made.scenario.client_data(0, 5, Path(made.save(tmp_path)))
    assert (len(data.train), len(data.validation), len(data.test["all"])) == (26, 4, 10)
    seen = torch.cat([data.train.x, data.validation.x, data.test["all"].x])
    given = torch.from_numpy(samples(1)[0]).float()
    assert torch.equal(seen[torch.argsort(seen[:, 1])], given[torch.argsort(given[:, 1])])


def test_arrays_that_cannot_be_written_are_one_sentence(scenario: InMemory, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"the arrays cannot be written into .*file \(Not a directory\)"):
        perennial.run("ditto", scenario, rounds=1, out=tmp_path / "file")


def test_a_run_folder_may_be_moved(scenario: InMemory, tmp_path: Path) -> None:
    whole = perennial.run("ditto", scenario, rounds=4, settings=FEW, out=tmp_path / "whole")
    made = perennial.run("ditto", scenario, rounds=2, settings=FEW, out=tmp_path / "made")
    before = made.predict_proba(X, client="north")
    moved = made.folder.rename(tmp_path / "moved")
    assert np.array_equal(perennial.load(moved).predict_proba(X, client="north"), before)
    file = moved / "config.toml"
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 4"))
    assert perennial.resume(moved).accuracy == whole.accuracy


def test_other_data_under_the_same_name_are_refused(scenario: InMemory, tmp_path: Path) -> None:
    root, plain = Path(scenario.save(tmp_path)), scenario.scenario
    before = plain.client_data(0, 0, root)
    file = root / FOLDER / f"{plain.parts[0]}.safetensors"
    records = load_records(file)
    records["train"]["x"][3, 2] += 1
    save_records(file, records)
    with pytest.raises(UserError, match=r"east in .* are not those that the run was configured with"):
        plain.client_data(0, 0, root)
    file.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"the arrays of east in .* cannot be read"):
        plain.client_data(0, 0, root)
    file.unlink()
    with pytest.raises(
        UserError, match=r"east are not in .*; give the data root that has them \(data_root in the"
    ):
        plain.client_data(0, 0, root)
    scenario.save(tmp_path)
    assert torch.equal(plain.client_data(0, 0, root).train.x, before.train.x)


def test_arrays_that_change_under_a_scenario_are_refused(tmp_path: Path) -> None:
    x = np.zeros((8, 3), np.float32)
    made = from_arrays({"a": (x, Y), "b": (x, Y)})
    x += 1
    with pytest.raises(UserError, match="the arrays were changed after from_arrays took them; call it again"):
        perennial.run("fedavg", made, rounds=1, out=tmp_path / "run")


def test_the_same_arrays_have_the_same_digests(scenario: InMemory) -> None:
    clients = {"east": samples(2, 30), "north": samples(1)}
    again = from_arrays(clients, {"new": samples(3, 20)[:2], "own": {"north": samples(4, 16)[:2]}})
    assert again.scenario == scenario.scenario
    x, y, environment = samples(1)
    other = from_arrays({**clients, "north": (x, 1 - y, environment)})
    assert other.scenario.parts[1] != scenario.scenario.parts[1]


class Frame:
    """As much of a pandas DataFrame as arrays are made of."""

    def __init__(self, x: Any, columns: list[Any]) -> None:
        self.x, self.columns = x, columns

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.x, dtype)


def test_columns_of_frames_are_the_same_everywhere() -> None:
    names, other = ["age", "dose", "pulse", "rate", "size"], ["dose", "age", "pulse", "rate", "size"]
    frame, turned, plain = Frame(X, names), Frame(X, other), Frame(X, [0, 1, 2, 3, 4])
    assert from_arrays({"a": (X, Y), "b": (plain, Y), "c": (frame, Y)}, {"new": (Frame(X, names), Y)})
    said = r"column 0 of x is 'dose', and in b 'age'; all must have the same columns in the same order"
    with pytest.raises(UserError, match=f"c: {said}"):
        from_arrays({"a": (plain, Y), "b": (frame, Y), "c": (turned, Y)})
    with pytest.raises(UserError, match=f"test 'new': {said}"):
        from_arrays({"b": (frame, Y)}, {"new": (turned, Y)})


X, Y, E = samples(0, 8)
NAN = X.copy()
NAN[5, 2] = np.nan
LONG, LATE = np.zeros((1200, 5)), np.array(["u", "v"] * 600, object)
LATE[1100] = None
BAD: list[tuple[Any, dict[str, Any], str]] = [
    ({}, {}, "clients: there must be at least one site"),
    ([(X, Y), (X, Y)], {}, "clients must be a dict of arrays by site, such as {"),
    (X, {}, '{"site-a": (x, y, environment)}, not ndarray of 8'),
    ({"a": (X, Y)}, {"test": (X, Y)}, "test must be a dict of arrays by environment, such as {"),
    ({"a": (X, Y)}, {"test_fraction": 0.95}, "test_fraction: 0.95 is not possible with validation_fraction = 0.1"),
    ({"a": X}, {}, "a must be (x, y, environment) or (x, y), not ndarray of 8"),
    ({"a": (X, None, E)}, {}, "a: y must be numbers or texts of one kind, not NoneType"),
    ({"a": (X, ["u", "v", np.nan, "v"] * 2)}, {}, "a: y has no value for sample 2; leave that sample out"),
    ({"a": (X, Y, ["u", 1] * 4)}, {}, "a: environment must be numbers or texts of one kind, not int and str"),
    ({"a": (LONG, LATE)}, {}, "a: y has no value for sample 1100; leave that sample out"),
    ({"a": (np.ma.masked_array(X, X > 1), Y)}, {}, "a: x has masked values; fill them, or leave out the samples"),
    ({"a": (X, Y), 1: (X, Y), "1": (X, Y)}, {}, "clients: '1' is there twice, as a text and as a number"),
    ({"a": (X, [], E)}, {}, "a: y must have one class for each sample; there is none"),
    ({"a": (X, Y.astype(float), E)}, {}, "y has floats that are whole numbers, 0, 1 and so on, which may be"),
    ({"a": (X, Y * 0, E)}, {}, "y is 0 everywhere; there must be at least two classes"),
    ({"a": (X[:5], Y, E)}, {}, "a: x must be numbers, 8 rows as in y and a column for each feature"),
    ({"a": (X[:, 0], Y, E)}, {}, "a: x must be numbers, 8 rows as in y and a column for each feature"),
    ({"a": (X[:0], Y[:0], E[:0])}, {}, "a: y must have one class for each sample; there is none"),
    ({"a": (X.astype(str), Y, E)}, {}, "a: x must be numbers, 8 rows as in y and a column for each feature"),
    ({"a": ([[1.0], [1.0, 2.0]], [0, 1], E[:2])}, {}, "a: x is no array"),
    ({"a": (X, ["u", " "] * 4)}, {}, "a: y of sample 1 is an empty text; name its class, or leave the sample out"),
    ({"a": (NAN, Y, E)}, {}, "a: sample 5 has in number 2 what is no finite number"),
    ({"a": (X * 1e300, Y, E)}, {}, "a: sample 0 has in number 0 what is no finite number (as float32)"),
    ({"a": (X[:, :0], Y, E)}, {}, "a: a sample has shape 0, which has no numbers"),
    ({"a": (X, Y, E), "b": (X[:, :4], Y, E)}, {}, "b: a sample has shape 4, and in a 5; all must be alike"),
    ({"a": (X, Y, E), "b": (X, Y)}, {}, "b has no environments, and a has; give all of them some, or none"),
    ({"a": (X, Y, E[:3])}, {}, "a: environment must be 8 whole numbers or texts as in y, or one text; it is <U4"),
    ({"a": (X, Y, None)}, {}, "a: environment is None; give one for each sample, or leave it out"),
    ({"a": (X, Y, E), "b": (X, [str(y) for y in Y], E)}, {}, "y has texts in one of a and b, and numbers in the"),
    ({"a b": (X, Y, E)}, {}, "'a b' is no name of a site"),
    ({"a": (X, Y, E)}, {"test": {}}, "test: there must be at least one environment"),
    ({"a": (X, Y, E)}, {"test": {"new": (X, Y, E)}}, "test 'new' must be (x, y), not tuple of 3"),
    ({"a": (X, Y, E)}, {"test": {"new": (X, Y + 1)}}, "test 'new': class 2 is in no client's samples"),
    ({"a": (X, Y, E)}, {"test": {"new": {"z": (X, Y)}}}, "test 'new': z is no client; there are a"),
    ({"a": (X, Y, E)}, {"test": {"new": (X, Y)}, "test_fraction": 0.5}, "test_fraction = 0.5 is not possible"),
    ({"a": (X, Y, E)}, {"classes": ["only"]}, "a: y has 1, which is none of the 1 classes"),
    ({"a": (X, Y, E)}, {"classes": ["one", "one"]}, "classes: 'one' is there twice; name each class once"),
    ({"a": (X, Y, E)}, {"classes": [0, 1, True]}, "classes: 1 is there twice; name each class once"),
    ({"a": (X, ["u", "v"] * 4)}, {"classes": ["u", "v", "v"]}, "classes: 'v' is there twice; name each class"),
    ({"a": (X, Y + 1, E)}, {"class_weights": {2: 0.5, 1: 3}}, "is not possible; give a number for each of 1, 2"),
    ({"a": (X, Y, E)}, {"class_weights": "balance"}, "'balance' is not possible; give a number for each of 0"),
    ({"a": (X, Y, E)}, {"class_weights": None}, "class_weights: None is not possible; give a number for each of"),
    ({"a": (X, Y, E)}, {"classes": [1, 2]}, "a: y has 0, which is none of the 2 classes"),
    ({"a": (X, Y, E)}, {"classes": {1: "ill", 0: "well"}}, "classes = {1: 'ill', 0: 'well'} is not possible"),
    ({"a": (X, Y, E)}, {"classes": {"ill"}}, "classes = {'ill'} is not possible; give a list of"),
    ({"a": (X, Y, E)}, {"classes": "ab"}, "classes = 'ab' is not possible"),
    ({"a": (X, Y, E)}, {"classes": 2}, "classes = 2 is not possible"),
    ({"a": (X, Y, E)}, {"classes": ["well", None]}, "classes = ['well', None] is not possible"),
    ({"a": (X, Y, E)}, {"validation_fraction": 1.5}, "validation_fraction: 1.5 is not possible"),
    ({"a": (X, Y, E)}, {"test_fraction": np.array([0.1, 0.2])}, "test_fraction: array([0.1, 0.2]) is not"),
    ({"a": (torch.zeros(8, 5, device="meta"), Y, E)}, {}, "a: x is no array (Cannot copy out of meta tensor"),
    ({"a": (X, ["u", "u\0"] * 4)}, {}, r"a: y: 'u\x00' has a NUL or half a character; spell it with"),
    ({"a": (X, ["u", "\ud800"] * 4)}, {}, r"a: y: '\ud800' has a NUL or half a character"),
    ({"a": (X, Y, ["u\0", "v"] * 4)}, {}, r"a: environment: 'u\x00' has a NUL or half a character"),
    ({"a": (X, Y, "u\0")}, {}, r"a: environment: 'u\x00' has a NUL or half a character"),
    ({"a": (X, Y)}, {"test": {"t\0": (X, Y)}}, r"test: 't\x00' has a NUL or half a character"),
    ({"a": (X, Y)}, {"classes": ["u\0", "v"]}, r"classes: 'u\x00' has a NUL or half a character"),
]  # fmt: skip


@pytest.mark.parametrize(("clients", "options", "sentence"), BAD, ids=[own[2][:40] for own in BAD])
def test_what_is_wrong_with_arrays_is_one_sentence(clients: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        from_arrays(clients, **options)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


class Part:
    """A partition as flwr-datasets gives it."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self.column_names, self.features = columns, [*columns], dict[str, Any]()

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]


class Partitioner:
    """Two equal partitions."""

    num_partitions = 2

    def load_partition(self, _: int) -> Part:
        deep = [Image.fromarray(np.full((4, 4), 1000, np.uint16))] * 4
        flat = Image.fromarray(np.zeros((4, 4), np.uint8))
        return Part(picture=deep, gap=[flat, None, flat, flat], age=[1.0, 2.0] * 2, label=[0, 1] * 2)


@pytest.mark.parametrize(
    ("x", "test", "sentence"),
    [
        (
            "picture",
            None,
            "client-0: picture 0 of 'picture' cannot be read "
            "(it has more than 8 bits for each value; save it with 8)",
        ),
        ([], None, "x: there must be at least one column"),
        (None, None, "x: None is not possible; give the name of a column"),
        ("gap", None, "client-0: sample 1 has in 'gap' no picture, but NoneType; leave the sample out"),
        ("age", 3, "test: 3 is not possible; give a data set, or the name of a split"),
        (
            "age",
            "later",
            "test: 'later' is the name of a split, and a Partitioner has none; give the data set itself",
        ),
    ],
)
def test_what_cannot_be_used_of_partitions_is_one_sentence(x: Any, test: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        from_partitions(Partitioner(), x=x, y="label", test=test)


def test_a_run_folder_is_not_written_twice(ditto: Result, scenario: InMemory) -> None:
    before = RunFolder(ditto.folder).rows()
    with pytest.raises(UserError, match="already holds a run"):
        perennial.run("ditto", scenario, rounds=1, out=ditto.folder)
    assert RunFolder(ditto.folder).rows() == before


# ---------------------------------------------------------------------- in Flower's simulation


@pytest.mark.runtimes
@pytest.mark.parity
def test_arrays_of_a_program_are_the_same_in_a_simulation(scenario: InMemory, tmp_path: Path) -> None:
    local, simulated = (
        perennial.run("ditto", scenario, rounds=2, settings=FEW, runtime=runtime, out=tmp_path / runtime)
        for runtime in ("local", "simulation")
    )
    left, right = (
        load_tensors(tmp_path / name / "models" / "global.safetensors") for name in ("local", "simulation")
    )
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-6)
    assert local.summary["models"] == simulated.summary["models"]
    assert simulated.summary["left_out"] == {}
