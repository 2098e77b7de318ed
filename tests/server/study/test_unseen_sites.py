"""Own data in a comparison: a row for each site in the tables."""

import csv
import io
import json
import os
import shutil
from pathlib import Path
from statistics import fmean

import matplotlib
import pytest
from click.testing import Result
from messy_tables import SITES, hospitals
from rich.console import Console
from typer.testing import CliRunner

from perennial import load
from perennial.common.config import load_config
from perennial.common.models.settings import Module
from perennial.server import studies
from perennial.server.cli.main import app
from perennial.server.report.load import load as load_run
from perennial.server.report.page import report
from perennial.server.selection.split_rule import Select
from perennial.server.selection.summary import site_means
from perennial.server.study.batch import Outcome, Selected
from perennial.server.study.choose import Verdict
from perennial.server.study.compare import CONSTANT, comparison_tables
from perennial.server.study.run_names import run_name
from perennial.server.study.trial_tables import sweep_rows, sweep_tables


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def described(folder: Path) -> Path:
    """The configuration of runs with four tables, which lie beside it."""
    hospitals(folder / "hospitals")
    file = folder / "run.toml"
    assert call("describe", folder / "hospitals", "--impute", "median", "--out", file).exit_code == 0
    return file


@pytest.mark.parametrize("command", ["sweep", "tune"])
def test_every_site_is_in_a_search(command: str, tmp_path: Path) -> None:
    data = ("--config", described(tmp_path), "--data-root", tmp_path / "hospitals", "--out", tmp_path / "pool")
    options = (*data, "--trials", 2, "--rounds", 1, "--jobs", 1, "--set", "local_steps=1", "--device", "cpu")
    found = json.loads(call(command, "fedavg", *options, "--json").stdout)
    rows = found["trials"] if command == "tune" else found
    for row in rows:
        assert tuple(row["sites"]) == SITES
        # Every site has the one environment, so the mean over sites is that over clients.
        assert sum(row["sites"].values()) / 4 == pytest.approx(row["average"])
        assert row["worst site"] == min(row["sites"].values()) < row["worst"]
    shown = call(command, "fedavg", *options).stdout
    assert "per site" in shown
    assert "worst site" in shown
    assert all(site in shown for site in SITES)
    assert f"{100 * rows[1]['sites']['va']:.2f}" in shown.partition("per site")[2]


def test_a_table_that_was_corrected_and_another_folder_are_other_runs(tmp_path: Path) -> None:
    data = described(tmp_path)
    for name in ("same", "other"):
        shutil.copytree(tmp_path / "hospitals", tmp_path / name)

    def name(folder: str) -> str:
        return run_name(load_config(data, options={"method": "fedavg", "data_root": str(tmp_path / folder)}))

    before = name("hospitals")
    assert name("same") == before  # the same numbers come of it
    table = tmp_path / "other" / "va.csv"
    table.write_text(table.read_text().replace("ill", "well", 1))
    assert name("other") != before
    table.write_bytes((tmp_path / "hospitals" / "va.csv").read_bytes())
    os.utime(table, ns=(1, 1))
    assert name("other") == before


def test_a_run_on_the_same_tables_in_another_folder_is_not_damaged_when_the_first_change(tmp_path: Path) -> None:
    data, pool = described(tmp_path), tmp_path / "pool"
    shutil.copytree(tmp_path / "hospitals", tmp_path / "copy")

    def sweep(folder: str) -> list[dict[str, object]]:
        options = ("--config", data, "--data-root", tmp_path / folder, "--out", pool, "--device", "cpu", "--json")
        found = call("sweep", "fedavg", *options, "--trials", 1, "--rounds", 1, "--jobs", 1)
        assert found.exit_code == 0, found.output
        assert "damaged" not in found.stderr
        rows: list[dict[str, object]] = json.loads(found.stdout)
        return rows

    first = sweep("hospitals")
    (tmp_path / "hospitals" / "va.csv").unlink()
    assert sweep("copy") == first
    assert len(list(pool.glob("fedavg-*"))) == 1


def test_the_command_s_folder_is_stronger_than_the_file_s(tmp_path: Path) -> None:
    data = described(tmp_path)
    data.write_text('data_root = "nowhere"\n' + data.read_text())
    options = (
        "--config",
        data,
        "--data-root",
        tmp_path / "hospitals",
        "--out",
        tmp_path / "pool",
        "--device",
        "cpu",
    )
    found = call("sweep", "fedavg", *options, "--trials", 1, "--rounds", 1, "--jobs", 1, "--json")
    assert found.exit_code == 0, found.output


def test_a_module_that_was_edited_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_edited_net.py"
    file.write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    monkeypatch.setenv("PERENNIAL_PLUGINS", str(file))
    config = load_config(options={"method": "fedavg", "scenario": "colored-digits"})
    config = config.model_copy(update={"model": Module(name="my_edited_net:Net")})
    before = run_name(config)
    assert run_name(config) == before
    file.write_text(file.read_text() + "# another one\n")
    os.utime(file, ns=(1, 1))
    assert run_name(config) != before


def test_clients_that_share_a_data_set_have_no_table_of_sites() -> None:
    config = load_config(options={"method": "fedavg", "scenario": "colored-digits"})
    trials = [Outcome(config, Path("x"), None, "it stopped")]
    verdict = Verdict(None, Select.held_out, "", {})
    assert len(sweep_tables(trials, verdict)) == 1
    assert "sites" not in sweep_rows(trials, verdict)[0]


def test_a_table_of_a_paper_takes_no_data_of_ones_own() -> None:
    result = call("reproduce", "cmnist-8", "--config", "own.toml")
    assert result.exit_code == 2
    assert (
        "--config own.toml is not possible; a paper's table belongs to the paper's own scenario" in result.stderr
    )
    assert len(result.stderr.splitlines()) == 1


def test_every_site_is_in_the_comparison(tmp_path: Path) -> None:
    described(tmp_path)
    found = studies.compare(
        ["fedavg"],
        None,
        config=tmp_path / "run.toml",
        data_root=tmp_path / "hospitals",
        rounds=1,
        seeds=1,
        settings=["local_steps=1"],
        out=tmp_path / "pool",
        device="cpu",
    )
    assert tuple(found.sites) == SITES
    for row in found.rows:
        assert tuple(row.sites) == SITES
        # Every site has the one environment, so the mean over sites is that over clients.
        assert sum(own.mean for own in row.sites.values()) / 4 == pytest.approx(row.measures["average"].mean)
        assert min(own.mean for own in row.sites.values()) == pytest.approx(row.measures["worst site"].mean)
        assert row.measures["worst site"].mean < row.measures["worst"].mean
    assert {row.label for row in found.rows} == {"FedAvg", "Local", CONSTANT}
    summary, *_, table = comparison_tables(found)
    headings = [column.header for column in summary.columns]
    assert headings[2:] == ["worst\nsite", "average", "bottom\ndecile", "held-out"]
    console = Console(width=120, record=True)
    console.print(table)
    text = console.export_text()
    assert all(site in text for site in SITES)
    assert f"{100 * found.rows[0].sites['va'].mean:.2f}" in text


def test_python_and_the_report_have_the_worst_site_of_the_table_also_of_an_older_run(tmp_path: Path) -> None:
    options = ("--config", described(tmp_path), "--data-root", tmp_path / "hospitals", "--device", "cpu")
    words, run = ("run", *options, "--rounds", 1, "--set", "local_steps=1"), tmp_path / "run"
    call(*words, "--method", "fedavg", "--out", run)
    summary = json.loads((run / "summary.json").read_text())
    final = summary["models"]["global"]["final"]
    sites = [own for (own,) in (client.values() for client in final["clients"].values())]
    worst, average = min(sites), sum(sites) / 4
    assert (final["worst_site"], final["worst"]) == (worst, pytest.approx(average))
    for number in range(2):
        if number:  # as before a summary had it
            for found in summary["models"]["global"].values():
                del found["worst_site"]
            (run / "summary.json").write_text(json.dumps(summary))
        result = load(run)
        row = result.overall[0]
        assert (row["worst_site"], row["average"]) == (worst, pytest.approx(average))
        assert "worst" not in row  # it would be the average
        assert f" worst site {100 * worst:.2f} %, average {100 * average:.2f} % (" in repr(result)
        beside = call(*words, "--method", "ditto", "--out", tmp_path / f"beside-{number}").stdout
        assert f"reference: FedAvg has worst site {100 * worst:.2f}, average {100 * average:.2f} (" in beside
        shown = report([run], "markdown")[0]
        assert "| final: worst site | final: average | final: bottom decile |" in shown
        assert f"| FedAvg | global | 0 | {100 * worst:.2f} | {100 * average:.2f} |" in shown
        (line, *_) = csv.DictReader(io.StringIO(report([run], "csv")[0]))
        assert (float(line["worst site"]), float(line["worst"])) == (worst, pytest.approx(average))


def test_no_mean_has_sites_that_trained_and_a_site_that_did_not(tmp_path: Path) -> None:
    options = ("--config", described(tmp_path), "--data-root", tmp_path / "hospitals", "--device", "cpu")
    run, unseen = tmp_path / "run", ("--set", "test_sites=['va']", "--set", "adapt=12")
    few = ("--rounds", 1, "--set", "local_steps=1")
    shown = call("run", *options, *few, "--method", "ditto", *unseen, "--out", run).stdout
    models = json.loads((run / "summary.json").read_text())["models"]
    clients = {model: found["final"]["clients"] for model, found in models.items()}
    at = {model: {site: own["own"] for site, own in found.items()} for model, found in clients.items()}
    parts = {"training sites": SITES[:3], "unseen sites": ("va",)}
    lines = [line for line in csv.DictReader(io.StringIO(report([run], "csv")[0])) if line["selection"] == "final"]
    rows = [row for row in load(run).overall if row["selection"] == "final"]
    page = report([run], "markdown")[0]
    assert "*unseen sites* trained nothing" in page
    assert shown.index("training sites") < shown.index("unseen sites")
    for part, sites in parts.items():
        table = shown.partition(part)[2].partition("held-out")[0]
        assert [f"│ {site} " in table for site in SITES] == [site in sites for site in SITES]
        for model, own in at.items():
            worst, average = min(own[site] for site in sites), fmean(own[site] for site in sites)
            (row,) = (own for own in rows if (own["sites"], own["model"]) == (part, model))
            (line,) = (own for own in lines if own["model"] == f"{model}, {part}")
            assert (row["worst_site"], row["average"]) == (worst, pytest.approx(average))
            assert (float(line["worst site"]), float(line["average"])) == (worst, pytest.approx(average))
            assert f"{100 * average:.2f}" in table.partition("average")[2]
            cells = [f"{100 * own[site]:.2f}" if site in sites else "–" for site in SITES]
            assert f"| Ditto | {model}, {part} | final | {' | '.join(cells)} |" in page
    assert f" worst site {100 * at['personal']['va']:.2f} %, " in repr(load(run))
    assert "(personal, final, unseen sites)" in repr(load(run))
    curves = [load_run(run).curves[f"global, {part}"].value for part in parts]
    assert curves == [[pytest.approx(fmean(at["global"][site] for site in sites))] for sites in parts.values()]
    assert " over all sites (" in shown  # the constant below the tables
    matplotlib.use("Agg")
    assert len(load(run).plot().get_lines()) == 4  # two models at two kinds of sites
    matplotlib.pyplot.close("all")

    # The common model is asked; Local has none, so there is nothing to show.
    alone = call("run", *options, *few, "--method", "local", *unseen[:2], "--out", tmp_path / "local").stdout
    assert "training sites" in alone
    assert "unseen sites" not in alone
    assert "| Local | personal, unseen sites | 0 | – |" in report([tmp_path / "local"], "markdown")[0]


def test_a_site_without_test_samples_has_no_accuracy() -> None:
    facts = {"round": 1, "accuracy": {"a": 0.5}, "worst": 0.5, "average": 0.5, "pooled": 0.5, "validation": None}
    one = Selected.model_validate({**facts, "clients": {"x": {"a": 0.25, "b": 0.75}, "y": {}}})
    assert site_means(one.clients) == {"x": 0.5}


@pytest.mark.slow
def test_a_run_neither_goes_on_with_other_tables_nor_stands_beside_one_that_had_others(tmp_path: Path) -> None:
    options = ("--config", described(tmp_path), "--data-root", tmp_path / "hospitals", "--device", "cpu")
    run = ("run", *options, "--rounds", 1, "--set", "local_steps=1", "--out")
    runs = tmp_path / "runs"
    call(*run, runs / "one", "--method", "fedavg")
    beside = call(*run, runs / "two", "--method", "ditto").stdout
    assert "reference: FedAvg has" in beside

    table, settings = tmp_path / "hospitals" / "va.csv", runs / "one" / "config.toml"
    text = table.read_text()
    table.write_text(text.replace("ill", "well", 1))
    settings.write_text(settings.read_text().replace("rounds = 1", "rounds = 2"))
    refused = call("resume", runs / "one")
    assert refused.exit_code == 2
    assert "the data of va have changed since the run began; put them back, or" in refused.stderr
    settings.write_text(settings.read_text().replace("rounds = 2", "rounds = 1"))
    beside = call(*run, runs / "three", "--method", "ditto").stdout
    assert "reference: FedAvg is made by" in beside

    table.write_text(text)
    settings.write_text(settings.read_text().replace("rounds = 1", "rounds = 2"))
    gone_on = call("resume", runs / "one")
    assert gone_on.exit_code == 0, gone_on.output


@pytest.mark.slow
def test_a_study_takes_the_file_of_a_run_and_says_what_of_it_is_of_that_run_alone(tmp_path: Path) -> None:
    file = tmp_path / "run" / "config.toml"
    call(
        "run",
        "--method",
        "fedavg",
        "--scenario",
        "colored-digits",
        "--rounds",
        1,
        "--device",
        "cpu",
        "--out",
        file.parent,
    )
    options = ("--config", file, "--out", tmp_path / "pool", "--jobs", 1, "--device", "cpu", "--json")
    found = call("sweep", "ditto", *options, "--trials", 1, "--seed", 2)
    assert found.exit_code == 0, found.output
    assert f"of {file}, not used: [method] fedavg, seed = 0; in a study every method starts" in found.stderr

    assert call("tune", "ditto", *options, "--trials", 2).exit_code == 0
    (tuned,) = (tmp_path / "pool").glob("tuned-*.toml")
    found = call("compare", "--methods", "ditto", "--config", tuned, *options[2:], "--seeds", 1)
    assert found.exit_code == 0, found.output
    assert f"of {tuned}, not used: [method] ditto, seed = 0; in a study" in found.stderr
    assert not studies.not_used(described(tmp_path))
