"""Own tables whose targets are numbers, labels or times to an event, from `describe` to a trained model."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from flwr.app import Context, Message
from lifetables import kaplan_meier
from target_tables import COLUMNS, SITES, dropped, hospitals
from typer.testing import CliRunner, Result

from perennial.client.app import OneHandlerApp
from perennial.client.node.settings import Consent
from perennial.client.node.survey import Respondent, Table
from perennial.client.site_data import OwnSite
from perennial.common.config import load_config
from perennial.common.data.site_files import for_survey
from perennial.common.survey import Asked
from perennial.common.tasks import Event, Labels, Numbers
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.local import number
from perennial.server.run.grid import LocalGrid
from perennial.server.survey.describe import announcement, describe, question
from perennial.server.survey.survey import Surveyed, survey


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hospitals(tmp_path / "sites")
    return tmp_path / "sites"


def asked(task: str, **others: Any) -> Any:
    return question(drop=dropped(task), target=task, label_column=COLUMNS[task], **others)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def described(folder: Path, task: str) -> Surveyed:
    return describe(folder, asked=asked(task))


# ---------------------------------------------------------------------- what is announced


def test_numbers_are_announced_with_mean_and_scale_and_are_no_features(tmp_path: Path) -> None:
    values = hospitals(tmp_path / "sites")
    found = described(tmp_path / "sites", "numbers").scenario
    assert found.inputs == ("age", "dose")
    task = found.task
    assert isinstance(task, Numbers)
    assert (task.names, task.kind) == (("days",), "squared")
    assert task.mean[0] == pytest.approx(values["days"].mean(), rel=1e-4)
    assert task.scale[0] == pytest.approx(values["days"].std(), rel=1e-4)


def test_labels_may_have_empty_cells(folder: Path) -> None:
    found = described(folder, "labels").scenario
    assert found.task == Labels(("flu", "cough"))
    east = found.client_data(0, 0, folder)
    assert east.train.y[:, 1].isnan().any()
    assert not east.train.y[:, 0].isnan().any()


def test_an_event_has_intervals_that_as_many_reach_and_a_censoring_curve(tmp_path: Path) -> None:
    values = hospitals(tmp_path / "sites")
    task = described(tmp_path / "sites", "event").scenario.task
    assert isinstance(task, Event)
    shares = [(values["time"] <= end).mean() for end in task.times]
    assert shares == pytest.approx([0.095 * n for n in range(1, 11)], abs=0.06)
    exact = kaplan_meier(values["time"], values["died"] == 0, task.times)
    assert list(task.censoring) == pytest.approx(exact, abs=0.1)


def test_classes_are_announced_as_before(folder: Path) -> None:
    found = describe(folder, asked=question(drop=["days", "cough", "time", "died"], label_column="flu")).scenario
    assert not {"target", "loss", "times"} & announcement(found).keys()
    assert found.labels == ("0", "1")


def federation(folder: Path) -> LocalGrid:
    files = sorted(folder.glob("*.csv"))

    def load(file: Path, wanted: Any) -> Any:
        return for_survey(file, wanted.targets, "", "")

    sites = [Respondent(file.stem, partial(load, file), Consent.full, 10) for file in files]

    def reply(message: Message, context: Context) -> Message:
        return sites[number(context)].answer(message)

    return LocalGrid(OneHandlerApp(reply), len(files))


@pytest.mark.parametrize("task", COLUMNS)
def test_under_secure_aggregation_the_same_is_announced(task: str, folder: Path) -> None:
    plain, secure = (survey(federation(folder), asked(task, secure=secure)) for secure in (False, True))
    assert plain.scenario.task == secure.scenario.task
    assert plain.facts == secure.facts


@pytest.mark.parametrize("task", COLUMNS)
def test_what_is_described_is_trained_and_beats_a_constant(task: str, folder: Path, tmp_path: Path) -> None:
    drop = [flag for name in dropped(task) for flag in ("--drop", name)]
    own = tmp_path / "own.toml"
    told = call("describe", folder, "--task", task, "--label-column", COLUMNS[task], *drop, "-o", own)
    assert told.exit_code == 0, told.output
    done = call(
        "run", "--config", own, "--method", "fedavg", "--rounds", "30", "--data-root", folder,
        "--set", "learning_rate=0.2", "--device", "cpu", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    config = load_config(tmp_path / "run" / "config.toml")
    measure = config.predicts.headline
    assert f"test {measure.label}" in " ".join(done.stdout.split())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    ours, constant = summary["models"]["global"]["final"], summary["constant"]
    assert measure.goodness(ours["average"]) > measure.goodness(constant["average"]) + 0.05
    sites = ours["clients"].values()
    assert ours["worst_site"] == measure.worst(value for own in sites for value in own.values())


@pytest.mark.slow
@pytest.mark.parametrize("task", COLUMNS)
def test_what_is_described_is_tuned_compared_and_asked_without_each_site(
    task: str, folder: Path, tmp_path: Path
) -> None:
    """The file names no method, and so none that lacks the task."""
    drop = [flag for name in dropped(task) for flag in ("--drop", name)]
    own, of_columns = tmp_path / "own.toml", ("--task", task, "--label-column", COLUMNS[task])
    assert call("describe", folder, *of_columns, *drop, "-o", own).exit_code == 0
    shared = (
        "--config",
        own,
        "--data-root",
        folder,
        "--rounds",
        "2",
        "--device",
        "cpu",
        "--out",
        tmp_path / "pool",
    )
    measure = load_config(own, {"method": "fedavg"}).scenario.task.headline
    for command in (
        ("tune", "ditto", "--trials", "2", *shared),
        ("compare", "--methods", "ditto", "--seeds", "1", *shared),
        ("compare", "--leave-one-site-out", "--adapt", "12", "--methods", "ditto", "--seeds", "1", *shared),
    ):
        told = call(*command, "--jobs", "1")
        assert told.exit_code == 0, told.output
        assert measure.label in " ".join(told.stdout.split())
        assert all(site in told.stdout for site in SITES)


# ---------------------------------------------------------------------- what a site keeps to itself


def test_events_are_counted_in_groups_so_that_two_questions_differ_by_none_or_many(folder: Path) -> None:
    """Whoever moves an interval's end by one row learns nothing of that row."""
    wanted = asked("event")
    table = Table(for_survey(folder / "east.csv", wanted.targets, "", ""), wanted)
    times = np.sort(np.array(table._read("time"), float))
    counts = []
    for end in (times[40:70, None] + [0, 1e-4]).flatten():
        step = Asked(step="intervals", times=(float(end),))
        counts.append([value for value in table.sums(step)])
    differences = np.abs(np.diff(np.array(counts), axis=0))
    assert differences.max() >= 10
    assert ((differences == 0) | (differences >= 10)).all()
    assert all(value == 0 or value >= 10 for own in counts for value in own)


def test_a_site_that_tells_names_and_counts_alone_tells_no_times(folder: Path) -> None:
    wanted = asked("event")
    found = for_survey(folder / "east.csv", wanted.targets, "", "")
    told = Table(found, wanted, Consent.counts).sums(Asked(step="intervals", times=(1.0, 30.0)))
    assert told == [0.0] * 6


# ---------------------------------------------------------------------- what is wrong


def change(folder: Path, site: str, column: str, row: int, cell: str) -> None:
    head, *lines = (folder / f"{site}.csv").read_text().splitlines()
    cells = lines[row - 1].split(",")
    cells[head.split(",").index(column)] = cell
    lines[row - 1] = ",".join(cells)
    (folder / f"{site}.csv").write_text("\n".join([head, *lines]) + "\n")


def constant(folder: Path) -> None:
    for site in SITES:
        for row in range(1, 151):
            change(folder, site, "days", row, "7")
        lines = (folder / f"{site}.csv").read_text().splitlines()
        (folder / f"{site}.csv").write_text("\n".join(lines[:151]) + "\n")


@pytest.mark.parametrize(
    ("task", "column", "cell", "said"),
    [
        ("numbers", "days", "inf", "no finite number"),
        ("numbers", "days", "long", "is no number; most others are numbers, so correct the cell"),
        ("labels", "flu", "2", "column 'flu': a row is neither 0 nor 1"),
        ("event", "time", "-1", "column 'time': a row is a time before 0"),
        ("event", "died", "3", "column 'died': a row is neither 0 nor 1"),
    ],
)
def test_targets_that_cannot_be_are_one_sentence(
    task: str, column: str, cell: str, said: str, folder: Path
) -> None:
    change(folder, "east", column, 3, cell)
    assert said in described(folder, task).left_out["east"]


def test_a_target_has_no_empty_cells(folder: Path) -> None:
    change(folder, "east", "days", 3, "")
    with pytest.raises(
        UserError, match="'days', which is to be predicted, has 1 empty cells; fill them in, or take"
    ):
        described(folder, "numbers")


def test_a_number_that_is_the_same_everywhere_is_nothing_to_predict(folder: Path) -> None:
    constant(folder)
    with pytest.raises(UserError, match="'days' has the same number in every row, so there is nothing to predict"):
        described(folder, "numbers")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("event", "time"), "an event has two columns, its time and whether it happened"),
        (("numbers", "day"), "has no column 'day' for the label"),
        (("numbers", "days", "--drop", "days"), "--drop is for features, and 'days' is to be predicted"),
        (("numbers", "days", "--class-weights", "balanced"), "is for classes; leave it out"),
        (("number", "days"), "'number' is not one of 'classes', 'numbers', 'labels', 'event'"),
    ],
)
def test_questions_that_cannot_be_are_one_sentence(flags: tuple[str, ...], said: str, folder: Path) -> None:
    task, columns, *others = flags
    told = call("describe", folder, "--task", task, "--label-column", columns, *others)
    assert (told.exit_code, told.stdout) == (2, "")
    assert said in " ".join(told.stderr.replace("│", " ").split())
    assert "Traceback" not in told.stderr


SETTINGS = {
    "numbers": {"target": "numbers", "labels": ["days"], "inputs": ["age", "dose"]},
    "event": {"target": "event", "labels": ["time", "died"], "inputs": ["age", "dose"], "times": [10, 60]},
}


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("event", {"loss": "huber"}, "it is for target = 'numbers', and here that is 'event'"),
        ("numbers", {"target_mean": [1, 2]}, "there must be one for each of 1 targets, or none"),
        ("numbers", {"loss": "poisson", "target_scale": [2]}, "with loss = 'poisson' the numbers are counts"),
        ("numbers", {"class_weights": [2]}, "they are for classes and labels, and here target is 'numbers'"),
        ("numbers", {"times": [1]}, "it is for target = 'event', and here that is 'numbers'"),
        ("event", {"times": []}, "scenario.times: () is not possible; give times above 0"),
        ("event", {"times": [5, 3]}, "each later than the one before"),
        ("event", {"labels": ["time"]}, "an event has two columns: its time, and whether it happened"),
        ("event", {"censoring": [0.5]}, "censoring"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_one_sentence(
    task: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    scenario = {"name": "own-data", "sites": list(SITES), **SETTINGS[task], **settings}
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps({"scenario": {key: value for key, value in scenario.items() if value != []}}))
    told = call("run", "--config", file, "--method", "fedavg", "--data-root", tmp_path)
    assert (told.exit_code, told.stdout) == (2, "")
    assert said in told.stderr
    assert "Traceback" not in told.stderr


def site_of(folder: Path, label_column: str = "", **scenario: Any) -> Any:
    own = {"name": "own-data", "sites": list(SITES), "ignored": ["flu", "cough"], **scenario}
    config = load_config(options={"method": "fedavg", "scenario": own})
    return OwnSite(folder / "east.csv", "east", label_column).load(config)


def test_a_site_may_call_a_target_otherwise(folder: Path) -> None:
    text = (folder / "east.csv").read_text()
    wanted = {**SETTINGS["numbers"], "ignored": ["flu", "cough", "time", "died"]}
    data = site_of(folder, **wanted)
    (folder / "east.csv").write_text(text.replace("days", "length of stay", 1))
    assert torch.equal(site_of(folder, "length of stay", **wanted).train.y, data.train.y)
    with pytest.raises(UserError, match=r"label column 'a,b': there must be 1 columns"):
        site_of(folder, "a,b", **wanted)
    found = for_survey(folder / "east.csv", ("days",), "length of stay", "")
    assert "days" in found.columns


def test_a_target_out_of_the_announced_range_is_the_sites_own_error(folder: Path) -> None:
    wanted = {**SETTINGS["numbers"], "ignored": ["flu", "cough", "time", "died"]}
    assert len(site_of(folder, target_least=[0], target_most=[100], **wanted).train)
    with pytest.raises(UserError, match=r"east\.csv: a row has a days of .*; it must be at most 6") as refused:
        site_of(folder, target_most=[6], **wanted)
    assert refused.value.told == "east.csv: a row's target is not what the server announces", "no cell is told"


def test_a_class_where_a_number_is_announced_and_the_other_way_round(folder: Path) -> None:
    for site in SITES:
        for row in range(1, 20):
            change(folder, site, "flu", row, "yes")
    others = {"inputs": ["age", "dose"], "ignored": ["days", "cough", "time", "died"]}
    with pytest.raises(UserError, match="column 'flu' is no number"):
        site_of(folder, target="numbers", labels=["flu"], **others)
    others["ignored"][0] = "flu"
    with pytest.raises(UserError, match="is of no class that the server announces"):
        site_of(folder, labels=["0", "1"], label_column="days", **others)
