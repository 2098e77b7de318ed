"""The report: its tables hold the numbers of the run folders, and a real browser shows them."""

import csv
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from browser_page import browse, in_a_browser
from typer.testing import CliRunner, Result

from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.report.load import find_runs, load, load_runs
from perennial.server.report.page import report
from perennial.server.report.panels import round_means
from perennial.server.report.results import results
from perennial.server.report.tables import environment_table, score_table, to_csv
from perennial.server.results import figures
from perennial.server.results.figures import Line, line_figure, membership_figure
from perennial.server.run.folder import RunFolder
from perennial.server.study.batch import Scores
from perennial.server.study.compare import Spread
from perennial.server.study.run_names import name_without_code
from perennial.testing.tiny_federation import toy_config

NASTY = '"><img src=x onerror=alert(1)><script>alert(1)</script> $x|*_&'


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg with two seeds, Ditto with one."""
    folder = tmp_path_factory.mktemp("made")
    for method, seed in (("fedavg", 0), ("fedavg", 1), ("ditto", 0)):
        config = toy_config(method, seed=seed)
        LocalRuntime(config).run(RunFolder.create(folder / f"{method}-{seed}", config))
    return folder


@pytest.fixture(scope="session")
def page(made: Path) -> str:
    text, skipped = report([made])
    assert skipped == []
    return text


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """The same runs, to be spoiled."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def edited(file: Path, *changes: tuple[str, str]) -> None:
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def copied(runs: Path, name: str, seed: int, method: Any = (), scenario: Any = (), **settings: Any) -> Path:
    """A copy of FedAvg's first run under another configuration."""
    folder = Path(shutil.copytree(runs / "fedavg-0", runs / name))
    config = RunFolder(folder).config()
    parts = {
        "method": config.method.model_copy(update=dict(method)),
        "scenario": config.scenario.model_copy(update=dict(scenario)),
    }
    (folder / "config.toml").write_text(config.model_copy(update={"seed": seed, **parts, **settings}).toml())
    (folder / "summary.json").write_text(json.dumps({**summary(folder), "seed": seed}))
    return folder


class Tables(HTMLParser):
    """The rows of every table of a page, by its caption."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: dict[str, list[list[str]]] = {}
        self.caption, self.text = "", ""
        self.row: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("caption", "th", "td"):
            self.text = ""
        elif tag == "tr":
            self.row = []

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            self.caption = self.text
            self.rows[self.caption] = []
        elif tag in ("th", "td"):
            self.row.append(self.text)
        elif tag == "tr":
            self.rows[self.caption].append(self.row)


def assert_holds_the_numbers(page: str, runs: Path) -> None:
    """The page's tables against the run folders' summaries, computed here by other means."""
    tables = Tables(page).rows
    seeds = [summary(runs / f"fedavg-{seed}")["models"]["global"] for seed in (0, 1)]

    def text(values: list[float]) -> str:
        shown = f"{100 * fmean(values):.2f}"
        return shown if len(values) == 1 else f"{shown} ±{100 * stdev(values):.2f}"

    def row(found: list[dict[str, Any]], selection: str) -> list[str]:
        chosen = [one[selection] for one in found]
        clients = [[fmean(own.values()) for own in one["clients"].values()] for one in chosen]
        return [
            *(text([one[name] for one in chosen]) for name in ("worst", "average")),
            *2 * [text([min(one) for one in clients])],  # of four clients one is the worst tenth
        ]

    ditto = summary(runs / "ditto-0")["models"]
    head, *body = tables["Summary: test accuracy in %"][1:]
    measures = ["worst", "average", "worst client", "bottom decile"]
    assert head == ["method", "model", "seeds", *measures, *measures]
    assert body == [
        ["Ditto", model, "0", *row([ditto[model]], "final"), *row([ditto[model]], "validation")]
        for model in ("global", "personal")
    ] + [["FedAvg", "global", "0, 1", *row(seeds, "final"), *row(seeds, "validation")]]

    head, *body = tables["Test accuracy in % by environment"]
    assert head == ["method", "model", "selection", "p=0.1", "p=0.9", "held-out training", "round"]
    expected = [
        [
            *(title, model, selection),
            *(text([one[selection]["accuracy"][name] for one in found]) for name in ("p=0.1", "p=0.9")),
            text([one[selection]["validation"] for one in found]),
            ", ".join(str(one[selection]["round"]) for one in found),
        ]
        for title, model, found in (
            ("Ditto", "global", [ditto["global"]]),
            ("Ditto", "personal", [ditto["personal"]]),
            ("FedAvg", "global", seeds),
        )
        for selection in ("final", "validation")
    ]
    assert body == expected


# ---------------------------------------------------------------------- numbers


def test_tables_hold_the_numbers_of_the_run_folders(made: Path, page: str) -> None:
    assert_holds_the_numbers(page, made)
    (head, *body) = Tables(page).rows["Runs"]
    assert [row[0] for row in body] == [str(made / name) for name in ("ditto-0", "fedavg-0", "fedavg-1")]
    versions = body[0][head.index("versions")]
    assert re.fullmatch(r"python 3\S+, perennial \S+, flwr 1\.\S+, torch \S+", versions)


def test_who_waits_is_told_how_many_runs_have_been_read(made: Path) -> None:
    told: list[tuple[int, int]] = []
    report([made], "csv", told=lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3)]


def test_csv_has_every_number_in_full(made: Path) -> None:
    text, _ = report([made], "csv")
    rows = {(row["method"], row["model"], row["selection"]): row for row in csv.DictReader(io.StringIO(text))}
    assert len(rows) == 6
    final = [summary(made / f"fedavg-{seed}")["models"]["global"]["final"] for seed in (0, 1)]
    row = rows["FedAvg", "global", "final"]
    assert (row["seeds"], row["rounds picked"], row["chosen on test data"]) == ("0, 1", "6 6", "no")
    assert float(row["worst"]) == fmean(one["worst"] for one in final)
    assert float(row["worst sd"]) == stdev(one["worst"] for one in final)
    assert float(row["accuracy p=0.9"]) == fmean(one["accuracy"]["p=0.9"] for one in final)
    assert rows["Ditto", "personal", "validation"]["average sd"] == ""


def test_csv_tells_configurations_apart_by_their_settings_and_folders(runs: Path) -> None:
    models = [{"hidden": (number, 11, 12, 13)} for number in (21, 22)]  # longer than a label may be
    for number, hidden in enumerate(models):
        model = RunFolder(runs / "fedavg-0").config().model.model_copy(update=hidden)
        copied(runs, f"own-{number}", number, method={"learning_rate": 0.001234}, model=model)
    text, _ = report([runs], "csv")
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["selection"] == "final"]
    assert "#" not in text
    fedavg = [row for row in rows if row["method"] == "FedAvg"]
    assert len({row["settings"] for row in fedavg}) == len(fedavg) == 3
    assert any("model.hidden=(21, 11, 12, 13)" in r["settings"] or "21, 11" in r["settings"] for r in fedavg)
    assert {row["run folders"] for row in rows} == {
        f"{runs / 'fedavg-0'}; {runs / 'fedavg-1'}",
        str(runs / "own-0"),
        str(runs / "own-1"),
        str(runs / "ditto-0"),
    }
    (ditto,) = (row for row in rows if row["method"] == "Ditto" and row["model"] == "personal")
    assert ditto["settings"] == ""


def test_markdown_has_the_tables_of_the_page(made: Path, page: str) -> None:
    text, _ = report([made], "markdown")
    for title, (*_, last) in Tables(page).rows.items():
        assert f"**{title}**" in text
        assert f"| {' | '.join(last)} |".replace("_", r"\_") in text
    assert "| method | model | seeds | final: worst |" in text


@pytest.mark.parametrize("form", ["html", "markdown", "csv"])
def test_oracle_only_on_request_and_labelled(made: Path, page: str, form: str) -> None:
    text = page if form == "html" else report([made], form)[0]
    assert "oracle" not in text.replace("oracle = false", "")  # a setting of the scenario
    text = report([made], form, oracle=True)[0]
    assert "oracle" in text
    assert "chosen on test data" in text


def test_the_oracle_is_the_best_round_on_test(made: Path) -> None:
    text, _ = report([made / "fedavg-0"], "csv", oracle=True)
    rows = {row["selection"]: float(row["average"]) for row in csv.DictReader(io.StringIO(text))}
    curve = load(made / "fedavg-0").curves["global"]
    assert rows["oracle"] == max(curve.value)
    assert rows["final"] == curve.value[-1]


def test_curves_follow_the_log(made: Path) -> None:
    curve = load(made / "fedavg-0").curves["global"]
    rows = RunFolder(made / "fedavg-0").rows()
    assert curve.rounds == [2, 4, 6]
    assert curve.sent[-1] == sum(row["bytes_up"] + row["bytes_down"] for row in rows if row["kind"] == "round")
    last = [row for row in rows if row["kind"] == "evaluation" and row["round"] == 6 and row["split"] == "test"]
    environments = [[row["loss"][place] / row["count"][place] for row in last] for place in (0, 1)]
    assert curve.loss[-1] == pytest.approx(fmean(map(fmean, environments)))


def test_configurations_are_told_apart_and_seeds_are_not(runs: Path) -> None:
    default = RunFolder(runs / "fedavg-0").config().flat()["method.learning_rate"]
    copied(runs, "a", seed=7, method={"learning_rate": 0.5})
    copied(runs, "b", seed=8, method={"learning_rate": 0.5}, wait=3.0, device="cpu")
    copied(runs, "c", seed=9, scenario={"samples": 41})
    found = results(load_runs(find_runs([runs]))[0])
    assert {(entry.scenario, entry.method, entry.seeds) for entry in found} == {
        ("toy (samples=40)", "Ditto", "0"),
        ("toy (samples=40)", f"FedAvg (learning_rate={default})", "0, 1"),
        ("toy (samples=40)", "FedAvg (learning_rate=0.5)", "7, 8"),
        ("toy (samples=41)", "FedAvg", "9"),
    }


def many(runs: Path, count: int) -> None:
    """Copies of one run as the trials of a sweep: other hyper-parameters, other results on held-out data."""
    for number in range(count):
        drawn = {"learning_rate": 0.01 + number / 1000, "local_steps": 20 + number, "batch_size": 20 + number}
        folder = copied(runs, f"trial-{number}", seed=0, method=drawn)
        facts = summary(folder)
        facts["models"]["global"]["final"]["validation"] = number / count
        (folder / "summary.json").write_text(json.dumps(facts))


@pytest.mark.slow
def test_forty_runs_make_a_page_of_modest_size(runs: Path) -> None:
    many(runs, 40)
    page, skipped = report([runs])
    assert skipped == []
    assert len(page) < 1_000_000
    tables = Tables(page).rows
    assert len(tables["Summary: test accuracy in %"]) == 2 + 40 + 3
    assert len(tables["Numbered configurations"]) == 1 + 41
    legend = re.search(r'<ul class="legend">(.*?)</ul>', page, re.S)
    assert legend
    drawn = re.findall(r"<span>([^<]*), global</span>", legend[1])
    assert len(drawn) + 1 == figures.STYLES  # and Ditto's personal model
    assert "Ditto" in drawn
    rows = [row for row in tables["Test accuracy in % by environment"] if row[0].startswith("FedAvg")]
    held_out = {row[0]: float(row[-2].split()[0]) for row in rows if row[2] == "final"}
    assert set(drawn) - {"Ditto"} == set(sorted(held_out, key=held_out.__getitem__)[-10:])
    assert "12 of the 43 lines of the table are drawn" in page


# ---------------------------------------------------------------------- what cannot be read


def cut_log(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[: len(text) // 2])


def cut_rounds(folder: Path) -> None:
    rows = RunFolder(folder).rows()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["round"] < 5))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (cut_log, "is damaged"),
        (cut_rounds, "does not hold the 6 rounds"),
        (lambda folder: (folder / "summary.json").unlink(), "has no summary yet"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "cannot be read"),
        (lambda folder: (folder / "config.toml").unlink(), "has no config.toml"),
        (lambda folder: (folder / "summary.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "summary.json").write_text("[]"), "input should be an object"),
        (lambda folder: edited(folder / "summary.json", ('"worst"', '"lowest"')), "worst: a value is missing"),
        (
            lambda folder: edited(folder / "summary.json", ('"average": 0.', '"average": -5.')),
            "the accuracy average is -5",
        ),
        (lambda folder: edited(folder / "config.toml", ("momentum", "inertia")), "no such setting"),
        (lambda folder: edited(folder / "config.toml", ("seed = 0", "seed = 5")), "summary.json says seed 0"),
        (lambda folder: edited(folder / "metrics.jsonl", ('"bytes_up"', '"up"')), "bytes_up"),
    ],
)
def test_what_cannot_be_read_is_named_and_the_rest_reported(
    runs: Path, spoil: Callable[[Path], object], word: str
) -> None:
    whole, _ = report([runs], "csv")
    spoil(Path(shutil.copytree(runs / "fedavg-0", runs / "spoiled")))
    result = call(runs, "--format", "csv")
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("skipped: ")
    assert "spoiled" in line
    assert word in line
    assert result.stdout == whole


def test_the_page_lists_what_was_skipped(runs: Path) -> None:
    cut_log(Path(shutil.copytree(runs / "fedavg-0", runs / "spoiled")))
    assert call(runs).exit_code == 0
    page = (runs / "report.html").read_text()
    assert_holds_the_numbers(page, runs)
    assert "spoiled" in page[page.index('<section id="skipped">') :]
    assert "spoiled" in report([runs], "markdown")[0].split("## Skipped")[1]


def test_the_same_run_twice_is_no_second_seed(runs: Path) -> None:
    shutil.copytree(runs / "fedavg-0", runs / "twin")
    text, skipped = report([runs], "csv")
    assert skipped == [f"{runs / 'twin'} has the configuration and the seed of {runs / 'fedavg-0'}, which counts"]
    assert text == report([runs / name for name in ("ditto-0", "fedavg-0", "fedavg-1")], "csv")[0]


def test_references_of_a_study_are_no_method_of_its_report(runs: Path) -> None:
    config = toy_config("references")
    LocalRuntime(config).run(RunFolder.create(runs / "references", config))
    assert "References" not in report([runs], "markdown")[0]
    assert "References" in report([runs / "references"], "markdown")[0]


@pytest.mark.parametrize("name", ["a-run", "z-run"])
def test_of_two_runs_of_one_configuration_the_newer_counts(name: str, runs: Path) -> None:
    again = Path(shutil.copytree(runs / "fedavg-0", runs / name))
    os.utime(again / "summary.json")  # as after a change of the code, which no configuration tells
    text, skipped = report([runs], "csv")
    assert skipped == [f"{runs / 'fedavg-0'} has the configuration and the seed of {again}, which counts"]
    assert str(again) in text


def test_no_mean_has_seeds_of_two_versions_of_the_code(runs: Path) -> None:
    place = {}
    for name, code in (("fedavg-0", "new"), ("fedavg-1", "old")):
        config = RunFolder(runs / name).config()
        place[code] = (runs / name).rename(runs / f"{name_without_code(config)}-{code}")
    os.utime(place["new"] / "summary.json")
    text, skipped = report([runs], "csv")
    assert skipped == [
        f"{place['old']} was made by other code than {place['new']}, which is newer; no mean has both"
    ]
    assert {row["seeds"] for row in csv.DictReader(text.splitlines()) if row["method"] == "FedAvg"} == {"0"}


def test_runs_with_other_files_of_ones_own_are_other_lines(runs: Path) -> None:
    """A seed that was run before a plug-in changed is not averaged with one that was run after it."""
    for name, digest in (("fedavg-0", "a" * 64), ("fedavg-1", "b" * 64)):
        (runs / name / "inputs.json").write_text(json.dumps({"plug-in mine": digest}))
    rows = csv.DictReader(io.StringIO(report([runs], "csv")[0]))
    found = {(row["settings"], row["seeds"]) for row in rows if row["method"] == "FedAvg"}
    assert found == {("plug-in mine=aaaaaaaa", "0"), ("plug-in mine=bbbbbbbb", "1")}
    assert "FedAvg (plug-in mine=aaaaaaaa)" in report([runs], "markdown")[0]


def test_nothing_to_report_is_one_sentence(runs: Path) -> None:
    (runs / "empty").mkdir()
    assert "holds no run folder" in call(runs / "empty").stderr
    assert "is not a folder" in call(runs / "absent").stderr
    cut_log(runs / "ditto-0")
    result = call(runs / "ditto-0")
    assert result.exit_code == 2
    assert result.stderr.startswith("perennial: none of 1 run folders can be reported; the first: ")
    assert not (runs / "ditto-0" / "report.html").exists()
    assert call(runs, "--out", runs / "no" / "page.html").exit_code == 2


@pytest.mark.slow
def test_a_report_is_written_over_reports_alone(runs: Path) -> None:
    run = runs / "ditto-0"
    before, table = (run / "config.toml").read_bytes(), runs / "patients.csv"
    table.write_text("age,label\n")
    for file, sentence in (
        (run / "config.toml", "--out"),
        (run / "models" / "new.html", "keeps; give another name"),
        (table, "is a table of another kind"),
        (runs / "page.pdf", "a report ends in .html, .md or .csv; or say what it is with --format"),
    ):
        result = call(run, "--out", file)
        assert (result.exit_code, sentence in result.stderr) == (2, True), result.output
    result = call(run, "--format", "html", "--out", run / "config.toml")
    assert (result.exit_code, "keeps; give another name" in result.stderr) == (2, True), result.output
    assert ((run / "config.toml").read_bytes(), table.read_text()) == (before, "age,label\n")
    for _ in range(2):
        for name, begins in (
            ("a.csv", "scenario,method,"),
            ("a.md", "# Perennial"),
            ("a.html", "<!"),
            ("a", "<!"),
        ):
            if name != "a" or not (runs / name).exists():
                assert call(run, "--out", runs / name).exit_code == 0, name
            assert (runs / name).read_text().startswith(begins)


def test_folders_below_folders_are_found_once(made: Path, tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    shutil.copytree(made / "ditto-0", deep / "ditto")
    (deep / "ditto" / "flower").mkdir()
    (deep / "ditto" / "flower" / "config.toml").touch()
    assert find_runs([tmp_path, deep, deep / "ditto"]) == [deep / "ditto"]
    with pytest.raises(UserError, match="holds no run folder"):
        find_runs([deep / "ditto" / "models", tmp_path])


# ---------------------------------------------------------------------- the page


def test_names_from_files_are_only_text(runs: Path) -> None:
    folder = runs / "fedavg-0"
    quoted = json.dumps(NASTY)[1:-1]
    for file in ("metrics.jsonl", "summary.json"):
        edited(folder / file, ("p=0.1", quoted), ("client-0", quoted))
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "clusters", "round": 6, "labels": {NASTY: 0, "\ud800": 1}}) + "\n")
    page, _ = report([runs])
    assert "<img" not in page
    assert page.count("<script") == 1  # the page's own
    assert NASTY in Tables(page).rows["Test accuracy in % by environment"][0]
    text, _ = report([runs], "markdown")
    assert "<img" not in text.replace(r"\<", "")
    lines = [line for line in text.splitlines() if line.startswith("| method | model | selection")]
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
    assert columns == {9}  # three names, two known environments, the nasty one, held-out and round: nothing split


def test_clusters_are_drawn_and_listed(runs: Path, page: str) -> None:
    assert "clusters in round" not in page
    with (runs / "ditto-0" / "metrics.jsonl").open("a") as log:
        for number in range(1, 7):
            labels = {"client-0": 1, "client-1": 0, "client-2": number % 2, "client-10": 1}
            if number == 3:
                del labels["client-0"]  # was not asked
            log.write(json.dumps({"kind": "clusters", "round": number, "labels": labels}) + "\n")
    page, _ = report([runs])
    assert Tables(page).rows["Ditto, seed 0: clusters in round 6"] == [
        ["cluster", "clients", "who"],
        ["0", "2", "client-1, client-2"],
        ["1", "2", "client-0, client-10"],
    ]
    assert 'aria-label="Ditto, seed 0: cluster of each client in each round"' in page
    assert "clusters in round 6" in report([runs], "markdown")[0]


def test_the_page_needs_nothing_and_can_be_read_by_machines(page: str) -> None:
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "url(http" not in page
    for word in (
        '<html lang="en">',
        'name="viewport"',
        "prefers-color-scheme: dark",
        'scope="col"',
        'scope="row"',
    ):
        assert word in page
    assert (
        page.count("<figure>") == page.count("<figcaption>") == page.count('role="img"') == 6
    )  # one where both selections agree
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert used <= set(ids)


def test_the_same_runs_give_the_same_page(made: Path, page: str) -> None:
    assert report([made])[0] == page


def test_figures_stay_small_whatever_they_show() -> None:
    long = [Line(style, range(5000), [float(x % 97) for x in range(5000)]) for style in range(figures.STYLES)]
    assert len(line_figure("a", long, "round", "accuracy (%)")) < 100_000
    labels = {f"client-{c}": [(c * round_) % 7 for round_ in range(1000)] for c in range(300)}
    assert len(membership_figure("b", range(1, 1001), labels)) < 200_000


def test_text_in_figures_is_text_and_coloured_by_the_page() -> None:
    drawn = line_figure("a", [Line(3, [0, 1], [1, 2], [0.1, 0.1])], "x $y$ <b>", "y", names=["café", "日本"])
    for word in (
        ">x $y$ &lt;b&gt;</text>",
        ">café</text>",
        ">日本</text>",
        "var(--s3)",
        "var(--ink)",
        "var(--grid)",
    ):
        assert word in drawn
    assert not re.search(r"#[0-9a-f]{6}\b", drawn)


def test_numbers_that_are_none_are_gaps() -> None:
    drawn = line_figure("a", [Line(0, [], []), Line(1, [1, 2], [float("nan"), float("inf")])], "x", "y")
    assert drawn.startswith("<svg")
    assert "nan" not in drawn.lower()


def test_a_quantity_that_a_round_lacks_leaves_the_mean_to_the_other_seeds(made: Path) -> None:
    none = float("nan")
    first, second = (load(made / f"fedavg-{seed}") for seed in (0, 1))
    curves = [replace(first.curves["global"], rounds=[1, 2], held_out=own) for own in ([none, 0.5], [none, none])]
    runs = [replace(run, curves={"global": own}) for run, own in zip((first, second), curves, strict=True)]
    found = round_means(replace(results([first])[0], runs=runs), "held_out")
    assert found == {1: None, 2: Spread(0.5, None)}


def test_names_that_environments_clients_and_measures_share(made: Path) -> None:
    """An environment `loss`, one called as a client is, and one called `all` have their own numbers."""
    run = load(made / "fedavg-0")
    names = {"loss": 0.25, "client-0": 0.5, "all": 0.75}
    facts = {"positives": 5, "specificity": 0.5, "auroc": 0.5, "auroc_error": 0, "calibration_error": 0}
    facts |= {"samples": 10, "reliability": []}
    scores = {
        "positive": "1",
        "all": {**facts, "sensitivity": 0.125},
        "environments": {name: {**facts, "sensitivity": value} for name, value in names.items()},
        "clients": {"client-0": {**facts, "sensitivity": 0.0}},
    }
    final = run.models["global"]["final"].model_copy(
        update={"values": names, "loss": 2.0, "scores": Scores.model_validate(scores)}
    )
    found = [replace(results([run])[0], runs=[replace(run, models={"global": {"final": final}})])]
    assert environment_table(found, ["final"]).rows[0][3:6] == ["25.00", "50.00", "75.00"]
    table = score_table(found)
    assert table
    assert [row[3:5] for row in table.rows] == [
        ["loss", "25.00"], ["client-0", "50.00"], ["all", "75.00"], ["all", "12.50"]
    ]  # fmt: skip
    (line,) = csv.DictReader(io.StringIO(to_csv(found, ["final"])))
    assert line["accuracy loss"] == "0.25"


# ---------------------------------------------------------------------- in a browser


@in_a_browser
def test_a_browser_shows_the_numbers_and_has_nothing_to_complain_about(runs: Path, tmp_path: Path) -> None:
    assert call(runs).exit_code == 0
    page = runs / "report.html"
    shown, complaints = browse(page, tmp_path / "profile")
    assert complaints == []
    assert_holds_the_numbers(shown, runs)
    assert shown.count("<svg") == page.read_text().count("<svg")
    # The same browser does complain, and loads nothing, where there is reason to.
    edited(page, ("</main>", "<script>document.title = 'ran'</script><img src='http://127.0.0.1:9/x'></main>"))
    shown, complaints = browse(page, tmp_path / "profile")
    assert len(complaints) == 2
    assert "<title>ran" not in shown
