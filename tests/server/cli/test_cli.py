"""The command line as a person meets it: tables, JSON, and one sentence for what is wrong."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from messy_tables import hospitals
from rich.table import Table
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from perennial.common.config import load_config
from perennial.common.methods import METHODS
from perennial.common.methods.fedavg import FedAvg
from perennial.common.tasks import EVERY_TASK, TaskName
from perennial.common.utils.errors import UserError
from perennial.server.app import main as serverapp
from perennial.server.cli import console, show
from perennial.server.cli.main import app, main
from perennial.server.cli.reference_lines import reference_lines
from perennial.server.local import LocalRuntime
from perennial.server.papers.recipes import recipe_config
from perennial.server.papers.reproduce import load_reproduction
from perennial.server.run.folder import InUse, RunFolder
from perennial.server.run.grid import LocalGrid
from perennial.server.selection.summary import versions
from perennial.server.study.constant import constant_predictor
from perennial.testing.tiny_federation import toy_config

TOY = ["--config", "toy.toml", "--set", "evaluate_every=2", "--set", "checkpoint_every=2"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERENNIAL_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "toy.toml").write_text('method = "fedavg"\n[scenario]\nname = "toy"\n')
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_run_ends_in_a_table_and_leaves_a_folder(here: Path) -> None:
    result = call("run", *TOY, "--method", "ditto", "--out", "one")
    assert result.exit_code == 0, result.output
    for word in ("p=0.1", "p=0.9", "worst", "average", "personal", "down", "up", "run folder: one"):
        assert word in result.stdout
    assert "best on test" not in result.stdout
    found = {path.name for path in (here / "one").iterdir()}
    assert found == {".lock", "config.toml", "log.jsonl", "metrics.jsonl", "summary.json", "checkpoint", "models"}


def test_the_versions_are_those_that_a_summary_has() -> None:
    said = ", ".join(f"{name} {version}" for name, version in versions().items())
    assert call("--version").output.strip() == said
    assert "perennial 0" in said


def test_command_line_beats_file_and_settings_beat_both(here: Path) -> None:
    (here / "own.toml").write_text(
        'rounds = 9\nseed = 4\n[scenario]\nname = "toy"\n[method]\nname = "ditto"\nproximity = 3.0\n'
    )
    result = call("run", "--config", "own.toml", "--rounds", "2", "--set", "proximity=0.5", "--out", "one")
    assert result.exit_code == 0, result.output
    config = RunFolder(here / "one").config()
    assert (config.rounds, config.seed, config.method.model_dump()["proximity"]) == (2, 4, 0.5)


def test_config_of_a_run_runs_again_to_the_same_numbers(here: Path) -> None:
    call("run", *TOY, "--rounds", "3", "--set", "learning_rate=0.02", "--out", "one")
    assert call("run", "--config", "one/config.toml", "--out", "two").exit_code == 0
    assert (here / "one" / "config.toml").read_text() == (here / "two" / "config.toml").read_text()
    assert RunFolder(here / "one").rows() == RunFolder(here / "two").rows()


def test_a_recipe_runs_with_its_row_and_says_what_it_is_not(here: Path) -> None:
    few = ["--set", "scenario.clients=4", "--set", "participation=1", "--set", "learning_rate=0.02"]
    result = call("run", "--recipe", "synthetic-scm/fedavg", "--rounds", "1", "--seed", "3", *few, "--out", "one")
    assert result.exit_code == 0, result.output
    assert "perennial reproduce synthetic-scm searches for hyper-parameters (8 trials)" in result.stderr
    config, table = RunFolder(here / "one").config(), load_reproduction("synthetic-scm")
    values = config.model_dump()
    assert (config.method.name, config.scenario.name) == ("fedavg", table.scenario)
    assert (config.rounds, config.seed, values["method"]["learning_rate"]) == (1, 3, 0.02)


def test_below_the_table_of_sites_stand_their_references_of_the_worst_site(here: Path) -> None:
    hospitals(here / "hospitals")
    assert call("describe", "hospitals", "--impute", "median", "--out", "own.toml").exit_code == 0
    words = ["run", "--config", "own.toml", "--data-root", "hospitals", "--rounds", "2"]
    fedavg = call(*words, "--method", "fedavg", "--out", "runs/fedavg")
    assert fedavg.exit_code == 0, fedavg.output
    scenario = RunFolder(here / "runs" / "fedavg").config().scenario
    data = [scenario.client_data(number, 0, here / "hospitals") for number in range(scenario.clients)]
    right = [100 * float((one.test["own"].y == one.train.y.mode().values).float().mean()) for one in data]
    assert min(right) < fmean(right)
    said = f"reference: a constant prediction has worst site {min(right):.2f}, average {fmean(right):.2f} ("
    assert said in fedavg.stdout

    final = RunFolder(here / "runs" / "fedavg").summary()["models"]["global"]["final"]
    sites = [100 * own["own"] for own in final["clients"].values()]
    ditto = call(*words, "--method", "ditto", "--out", "runs/ditto")
    assert f"reference: FedAvg has worst site {min(sites):.2f}, average {fmean(sites):.2f} (" in ditto.stdout


def test_below_the_table_stand_a_constant_and_fedavg_with_its_command(here: Path) -> None:
    result = call("run", *TOY, "--method", "ditto", "--rounds", "2", "--seed", "3", "--out", "runs/one run")
    assert result.exit_code == 0, result.output
    ours = constant_predictor(toy_config("fedavg"), 3)
    constant = (
        f"reference: a constant prediction has worst {100 * ours.worst:.2f}, average {100 * ours.average:.2f}"
    )
    assert constant in result.stdout
    (command,) = [line for line in result.stdout.splitlines() if line.startswith("reference: FedAvg is made by: ")]
    program, *arguments = shlex.split(command.partition("made by: ")[2])
    assert program == "perennial"
    assert "rounds: 0" in call(*arguments, "--rounds", "0").stderr
    # Not held against FedAvg of other rounds, seeds or models, nor against one that is damaged.
    for number, other in enumerate(
        ["--rounds=3", "--seed=4", "--set=model.hidden=[4]", "--set=participation=0.5"]
    ):
        assert call(*arguments, other, "--out", f"runs/other-{number}").exit_code == 0
    (here / "runs" / "damaged").mkdir()
    (here / "runs" / "damaged" / "config.toml").write_text("method = 3")
    assert command in call("show", "run", "runs/one run").stdout

    made = call(*arguments, "--out", "runs/two")
    assert "reference: FedAvg" not in made.stdout
    assert constant in made.stdout
    final = RunFolder(here / "runs" / "two").summary()["models"]["global"]["final"]
    numbers = f"worst {100 * final['worst']:.2f}, average {100 * final['average']:.2f}"
    again = "made by: perennial run --config runs/{}/config.toml)\n"
    line = f"reference: FedAvg has {numbers} ({again.format('two')}"
    assert line in call("show", "run", "runs/one run").stdout
    call(*arguments, "--set", "learning_rate=0.07", "--out", "runs/three")
    assert f"(learning_rate=0.07, {again.format('three')}" in call("show", "run", "runs/one run").stdout
    (here / "runs" / "three" / "summary.json").unlink()  # as of a run that has not ended
    assert line in call("show", "run", "runs/one run").stdout


def test_what_makes_a_reference_at_sites_says_that_it_takes_a_superlink(tmp_path: Path) -> None:
    config = load_config(options={"method": "ditto", "scenario": "colored-digits", "runtime": "deployment"})
    (line,) = reference_lines(tmp_path / "run", config, {})
    made = f"perennial run --method fedavg --config {tmp_path}/run/config.toml --superlink ADDRESS [--ca FILE]"
    assert line.endswith(made)


def test_the_first_command_has_its_references_below_the_table(here: Path) -> None:
    few = ["--rounds", "1", "--set", "scenario.clients=2", "--set", "scenario.train_per_class=5"]
    result = call("run", *few)
    assert result.exit_code == 0, result.output
    one, other = sorted((here / "runs").iterdir(), key=lambda folder: "fedavg" in folder.name)
    config, reference = RunFolder(one).config(), RunFolder(other).config()
    assert config == recipe_config("demo/fedsdr", {"rounds": 1}, few[3::2])[0]
    assert (config.method.name, config.scenario.name) == ("fedsdr", "colored-digits")
    assert reference.method == FedAvg()
    assert config.model_copy(update={"method": reference.method}) == reference
    final = RunFolder(other).summary()["models"]["global"]["final"]
    numbers = f"worst {100 * final['worst']:.2f}, average {100 * final['average']:.2f}"
    made = f"made by: perennial run --config {other.relative_to(here)}/config.toml)"
    lines = result.stdout.splitlines()
    table = max(number for number, line in enumerate(lines) if line.startswith("└"))
    constant, fedavg = (
        next(number for number, line in enumerate(lines) if line.startswith(f"reference: {name} has"))
        for name in ("a constant prediction", "FedAvg")
    )
    assert table < constant < fedavg
    assert lines[fedavg] == f"reference: FedAvg has {numbers} ({made}"
    assert f"run folder: {one.relative_to(here)}" in lines

    # Once it is there, and where a method or a folder is asked for, nothing more is trained than was asked for.
    one.rename(here / "runs" / "before")
    for arguments in ([], ["--seed", "1", "--method", "fedsdr"], ["--seed", "1", "--out", "elsewhere/one"]):
        assert call("run", *few, *arguments).exit_code == 0
    assert [folder.name for folder in (here / "elsewhere").iterdir()] == ["one"]
    assert sum("fedavg" in folder.name for folder in (here / "runs").iterdir()) == 1


@pytest.mark.slow
def test_the_last_line_says_where_the_page_is_or_how_to_get_it(here: Path) -> None:
    page, command = here / "one run" / "report.html", "page of this run: perennial report 'one run'"
    assert call("run", *TOY, "--rounds", "2", "--out", "one run").stdout.splitlines()[-1] == command
    assert call("show", "run", "one run").stdout.splitlines()[-1] == command
    assert not page.exists()
    assert call("report", "one run").exit_code == 0
    text = page.read_text()
    page.unlink()
    (here / "one run" / "summary.json").unlink()
    assert call("resume", "one run").stdout.splitlines()[-1] == command

    result = call("run", *TOY, "--rounds", "2", "--out", "two", "--report")
    assert result.stdout.splitlines()[-1] == "page of this run: two/report.html"
    words = re.compile(r"<h2>.*?</h2>")
    assert words.findall((here / "two" / "report.html").read_text()) == words.findall(text) != []
    result = call("run", *TOY, "--rounds", "2", "--out", "three", "--report", "--json")
    assert json.loads(result.stdout)["rounds"] == 2
    assert (here / "three" / "report.html").exists()


def test_a_run_with_clusters_shows_who_was_together_at_the_end(here: Path) -> None:
    assert "clusters" not in call("run", *TOY, "--rounds", "2", "--out", "one").stdout
    result = call("run", *TOY, "--rounds", "2", "--method", "cgpfl-heur", "--out", "two")
    assert result.exit_code == 0, result.output
    rows = {row["kind"]: row for row in RunFolder(here / "two").rows()}
    labels, chosen = rows["clusters"]["labels"], rows["heuristic"]
    assert "clusters in round 2" in result.stdout
    for cluster in set(labels.values()):
        assert ", ".join(client for client in sorted(labels) if labels[client] == cluster) in result.stdout
    assert f"chosen after round 1: {chosen['contexts']} clusters, μ = {chosen['mu']:.4g}" in result.stdout


def test_json_is_the_summary(here: Path) -> None:
    result = call("run", *TOY, "--rounds", "2", "--out", "one", "--json")
    assert json.loads(result.stdout) == json.loads((here / "one" / "summary.json").read_text())


def test_oracle_selection_only_on_request_and_labelled(here: Path) -> None:
    call("run", *TOY, "--out", "one")
    assert "oracle" not in call("show", "run", "one").stdout
    shown = call("show", "run", "one", "--oracle").stdout
    assert "oracle" in shown
    assert "chosen on test data" in shown


@pytest.mark.parametrize("kind", ["methods", "scenarios", "datasets", "models", "recipes"])
def test_lists(kind: str) -> None:
    lines = call("list", kind)
    names = json.loads(call("list", kind, "--json").stdout)
    assert len(names) >= 3
    assert all(name in lines.stdout for name in names)


@pytest.mark.parametrize("task", EVERY_TASK)
def test_methods_of_a_task(task: TaskName) -> None:
    names = json.loads(call("list", "methods", "--task", task, "--json").stdout)
    assert [*names] == [name for name, method in METHODS.items() if task in method.tasks]
    shown = call("list", "methods", "--task", task).stdout
    assert all(name in shown for name in names)
    assert ("fedrod" in shown) == (task == "classes")


def test_show_method_tells_its_tasks() -> None:
    facts = json.loads(call("show", "method", "fedrod", "--json").stdout)["tasks"]
    assert facts == {
        "has": ["classes"],
        "because": "its balanced risk counts a client's samples of each class",
        "otherwise": "fedrep",
    }
    assert "Tasks: classes, since its balanced risk counts" in call("show", "method", "fedrod").stdout
    assert "Tasks: classes, numbers, labels, event\n" in call("show", "method", "fedavg").stdout


def test_show_method_tells_default_symbol_bounds_and_search() -> None:
    shown = call("show", "method", "ditto").stdout
    for word in ("proximity", "λ", "≥0", "log", "Li et al."):
        assert word in shown
    facts = json.loads(call("show", "method", "ditto", "--json").stdout)
    assert facts["hyper-parameters"]["proximity"]["symbol"] == "λ"


def test_show_method_tells_what_the_authors_code_has_instead() -> None:
    code = json.loads(call("show", "method", "irm-l2", "--json").stdout)["preset=code"]
    assert (code["optimizer"], code["local_steps"]) == ("adam", 5)
    assert "With preset=code instead: optimizer=adam" in call("show", "method", "irm-l2").stdout
    assert "preset=code" not in call("show", "method", "fedavg").stdout


def test_show_scenario(here: Path) -> None:
    facts = json.loads(call("show", "scenario", "cmnist-80-oracle", "--json").stdout)
    assert facts["clients"] == 80
    assert facts["settings"]["oracle"]["default"] is True
    assert "label_noise" in call("show", "scenario", "cmnist").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "fedvag"], ["method", "fedvag", "fedavg"]),
        (["--scenario", "cmnst"], ["scenario", "cmnst", "cmnist"]),
        (["--set", "learning_rat=0.1"], ["learning_rat", "learning_rate"]),
        (["--set", "learning_rate=-1"], ["method.learning_rate", "-1", "greater than 0"]),
        (["--set", "learning_rate=much"], ["method.learning_rate", "much", "number"]),
        (["--set", "learning_rate"], ["key=value"]),
        (["--set", "data.x=1"], ["scenario", "'data'"]),
        (["--set", "scenario.clients=9"], ["scenario.clients", "9", "8"]),
        (
            ["--scenario", "cmnist-games", "--set", "scenario.clients=4"],
            ["scenario.train_agreement has 2 values for 4"],
        ),
        (["--set", "model.hidden=[0]"], ["hidden", "0", "greater"]),
        (["--set", "model.name=mpl"], ["mpl", "mlp"]),
        (["--set", "quorum=2"], ["quorum", "2", "1"]),
        (["--rounds", "0"], ["rounds", "0", "1"]),
        (["--seed", "-1"], ["seed", "-1", "0"]),
        (["--runtime", "cloud"], ["runtime", "cloud", "simulation"]),
        (["--scenario", "cmnist"], ["mnist", "PERENNIAL_DATA", "MNIST/raw"]),
        (["--scenario", "cmnist", "--data-root", "nowhere"], ["mnist", "nowhere"]),
        (["--device", "cuda:77"], ["cuda:77", "cpu"]),
        (["--config", "nowhere.toml"], ["nowhere.toml", "No such file"]),
        (["--out", "toy.toml/run"], ["toy.toml/run", "another"]),
        (["--out", ""], ["--out: an empty text is not possible"]),
        (["--recipe="], ["--recipe: an empty text is not possible"]),
    ],
)
def test_a_sentence_and_exit_code_2(arguments: list[str], words: list[str], here: Path) -> None:
    before = sorted(path.name for path in here.iterdir())
    result = call("run", *arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert len(sentences_of(result)) == 1
    assert all(word in result.stderr for word in words), result.stderr
    assert sorted(path.name for path in here.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("show run ''", "an empty text is not possible; name something"),
        ("compare --methods fedavg --config toy.toml --seeds 99999999999999999999", "--seeds"),
        ("compare --methods fedavg,references --config toy.toml", "unknown method 'references'"),
        ("compare --methods fedavg --config toy.toml --report no/page.html", "--report no/page.html: there is no"),
        ("compare --methods fedavg --config toy.toml --report page.csv", "let its name end in .html"),
        ("compare --methods fedavg --config toy.toml --report .", "--report . is a folder; name a file"),
    ],
)
def test_what_a_command_cannot_do_is_told_at_once(command: str, sentence: str, here: Path) -> None:
    result = call(*shlex.split(command))
    assert (result.exit_code, sentence in result.stderr) == (2, True), result.output
    assert [path.name for path in here.iterdir()] == ["toy.toml"]


def test_a_file_that_is_not_toml(here: Path) -> None:
    (here / "bad.toml").write_text("rounds = = 3")
    result = call("run", "--config", "bad.toml")
    assert result.exit_code == 2
    assert "bad.toml" in result.stderr


def test_a_folder_with_a_run_is_not_overwritten(here: Path) -> None:
    call("run", *TOY, "--rounds", "2", "--out", "one")
    before = (here / "one" / "metrics.jsonl").read_bytes()
    result = call("run", *TOY, "--rounds", "2", "--out", "one")
    assert result.exit_code == 2
    assert "perennial resume one" in result.stderr
    assert (here / "one" / "metrics.jsonl").read_bytes() == before


def test_truncated_checkpoint_is_named_and_nothing_is_lost(here: Path) -> None:
    call("run", *TOY, "--rounds", "6", "--out", "one")
    config = (here / "one" / "config.toml").read_text()
    (here / "one" / "config.toml").write_text(config.replace("rounds = 6", "rounds = 8"))
    arrays = here / "one" / "checkpoint" / "round-6" / "arrays.safetensors"
    whole = arrays.read_bytes()
    arrays.write_bytes(whole[:-10])
    log = (here / "one" / "metrics.jsonl").read_bytes()
    result = call("resume", "one")
    assert result.exit_code == 2
    assert "round-6" in result.stderr
    assert "round 4" in result.stderr
    assert (here / "one" / "metrics.jsonl").read_bytes() == log
    arrays.write_bytes(whole)
    assert call("resume", "one").exit_code == 0


def test_resume_of_what_cannot_be_resumed(here: Path) -> None:
    call("run", *TOY, "--rounds", "2", "--out", "one")
    assert "has ended" in call("resume", "one").stderr
    assert "not a run folder" in call("resume", "two").stderr
    assert call("resume", "one").exit_code == call("resume", "two").exit_code == 2


def edit(path: Path, old: str, new: str) -> None:
    text = (path / "config.toml").read_text()
    assert old in text
    (path / "config.toml").write_text(text.replace(old, new))


@pytest.mark.slow
def test_a_run_of_more_rounds_is_the_longer_run_and_says_so(here: Path) -> None:
    call("run", *TOY, "--rounds", "6", "--out", "long")
    call("run", *TOY, "--rounds", "4", "--out", "short")
    assert json.loads((here / "short" / "summary.json").read_text())["changed"] == []
    edit(here / "short", "rounds = 4", "rounds = 6")
    edit(here / "short", "deadline = 600.0", "deadline = 60.0")
    (here / "short" / "error.txt").write_text("why it stopped before\n")
    result = call("resume", "short")
    assert not (here / "short" / "error.txt").exists()
    line = "changed from round 5 on: rounds 4 → 6, deadline 600.0 → 60.0"
    assert result.exit_code == 0, result.output
    assert f"perennial: {line}\n" in result.stderr
    assert line in call("show", "run", "short").stdout
    rows, changed = RunFolder(here / "short").rows(), {"rounds": ["4", "6"], "deadline": ["600.0", "60.0"]}
    assert [row for row in rows if row["kind"] != "changed"] == RunFolder(here / "long").rows()
    assert RunFolder(here / "short").summary()["changed"] == [{"round": 5, "settings": changed}]
    short, long = (load_file(here / name / "models" / "global.safetensors") for name in ("short", "long"))
    assert all(torch.equal(short[name], long[name]) for name in long)

    # What is told holds for the rounds that stand: after a fall back there is one change, from the earlier round.
    shutil.rmtree(here / "short" / "checkpoint" / "round-6")
    edit(here / "short", "rounds = 6", "rounds = 7")
    assert call("resume", "short").exit_code == 0
    changed["rounds"] = ["4", "7"]
    assert RunFolder(here / "short").summary()["changed"] == [{"round": 5, "settings": changed}]


def test_a_run_is_not_resumed_with_other_settings_of_its_method(here: Path) -> None:
    call("run", *TOY, "--method", "ditto", "--rounds", "4", "--out", "one")
    (here / "one" / "summary.json").unlink()
    edit(here / "one", "proximity = 0.1", "proximity = 5.0")
    before = contents(here / "one")
    result = call("resume", "one")
    assert result.exit_code == 2
    assert "method.proximity was 0.1 in the 4 rounds that are done, and is 5.0 now; put it back" in result.stderr
    assert contents(here / "one") == before


@pytest.mark.parametrize("summary", ["[]", "{}", '{"models": 3}', '{"models": {"global": {"final": {}}}}'])
def test_a_damaged_summary_is_a_sentence(summary: str, here: Path) -> None:
    call("run", *TOY, "--rounds", "2", "--out", "one")
    (here / "one" / "summary.json").write_text(summary)
    result = call("show", "run", "one")
    assert result.exit_code == 2
    assert "perennial: " in result.stderr
    assert "damaged" in result.stderr


def test_a_number_that_is_too_large_in_a_summary_is_a_sentence(here: Path) -> None:
    call("run", *TOY, "--rounds", "2", "--out", "one")
    path = here / "one" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "wall_seconds": 10**400}))
    result = call("show", "run", "one")
    assert (result.exit_code, "damaged or of another version" in result.stderr) == (2, True)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("runtime", ["local", "deployment"])
def test_a_run_that_is_at_work_is_left_alone(runtime: str, here: Path) -> None:
    call("run", *TOY, "--rounds", "4", "--out", "one")
    (here / "one" / "summary.json").unlink()
    config = (here / "one" / "config.toml").read_text()
    (here / "one" / "config.toml").write_text(config.replace('runtime = "local"', f'runtime = "{runtime}"'))
    with RunFolder(here / "one").held():
        before = contents(here / "one")
        for command in (["resume", "one"], ["run", *TOY, "--runtime", runtime, "--out", "one"]):
            result = call(*command)
            assert result.exit_code == 2
            assert f"perennial: one is in use by process {os.getpid()} on " in result.stderr
        assert contents(here / "one") == before


def test_a_lock_that_is_taken_over_is_said(here: Path) -> None:
    call("run", *TOY, "--rounds", "2", "--out", "one")
    (here / "one" / "summary.json").unlink()
    (here / "one" / ".lock").write_text("process 7 on earth\n")
    result = call("resume", "one")
    assert result.exit_code == 0
    assert "process 7 on earth was at work on one and ended without a word" in result.stderr


def test_a_serverapp_leaves_a_run_alone_that_is_at_work(here: Path) -> None:
    call("run", *TOY, "--rounds", "2", "--out", "one")
    unset = dict.fromkeys(("config", "method", "scenario", "set", "desk"), "")
    settings = {**unset, "out": "one", "resume": "one"}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={**settings})
    with RunFolder(here / "one").held():
        before = contents(here / "one")
        with pytest.raises(InUse, match="one is in use by process"):
            serverapp(LocalGrid(ClientApp(), 4), context)
        assert contents(here / "one") == before  # nor an error.txt, which the other one's follower would read


def test_a_run_that_died_between_its_last_round_and_its_summary(here: Path) -> None:
    call("run", *TOY, "--rounds", "2", "--out", "one")
    before = json.loads((here / "one" / "summary.json").read_text())
    (here / "one" / "summary.json").unlink()
    assert "perennial resume one" in call("show", "run", "one").stderr
    assert call("resume", "one").exit_code == 0
    after = json.loads((here / "one" / "summary.json").read_text())
    assert {**after, "wall_seconds": 0} == {**before, "wall_seconds": 0}


def test_a_run_that_misses_its_quorum_stops_with_code_3(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from perennial.server import local

    monkeypatch.setattr(local.LocalGrid, "get_node_ids", lambda self: [1])
    result = call("run", *TOY, "--set", "wait=0.01", "--out", "one")
    assert result.exit_code == 3
    assert "1 of 4 clients" in result.stderr


def test_a_private_run_says_what_it_promises_and_an_impossible_one_is_refused(here: Path) -> None:
    private = ["--set", "privacy.mechanism=fixed", "--set", "privacy.noise_multiplier=10"]
    result = call("run", *TOY, "--method", "fedavg", "--rounds", "2", *private, "--out", "one")
    assert result.exit_code == 0, result.output
    assert "privacy: ε = 0.497 at δ = 1e-05 for everything that a client sent in to 2 models" in result.stdout
    assert call("run", "--config", "one/config.toml", "--out", "two").exit_code == 0
    result = call("run", *TOY, "--method", "cgpfl", *private, "--out", "three")
    assert result.exit_code == 2
    assert "privacy.mechanism: 'fixed' is not possible with method 'cgpfl'" in result.output
    assert not (here / "three").exists()


# ---------------------------------------------------------------------- what a newcomer meets


def sentences_of(result: Result) -> list[str]:
    """What went wrong, without what was done until then."""
    return [line for line in result.stderr.splitlines() if line.startswith("perennial: ")]


def test_a_file_and_another_scenario_says_what_is_not_used(here: Path) -> None:
    (here / "own.toml").write_text('rounds = 9\n[scenario]\nname = "colored-digits"\n[method]\nname = "ditto"\n')
    result = call("run", "--config", "own.toml", "--method", "fedavg", "--rounds", "0")
    assert result.stderr.splitlines()[0] == "perennial: of own.toml, not used with --method fedavg: [method] ditto"
    assert "rounds: 0 is not possible" in result.stderr


def test_an_empty_file_does_not_run_something_else(here: Path) -> None:
    (here / "empty.toml").touch()
    result = call("run", "--config", "empty.toml")
    assert (result.exit_code, len(sentences_of(result))) == (2, 1)
    assert "empty.toml has no settings" in result.stderr


def test_a_description_is_written_when_it_has_succeeded(here: Path) -> None:
    (here / "data.csv").write_text("a,label\n1,x\n2,y\n3,x\n")
    assert call("describe", "data.csv", "--at-least", "1", "--site", "süd", "--out", "run.toml").exit_code == 2
    assert not (here / "run.toml").exists()
    (here / "run.toml").write_text("before")
    assert call("describe", "data.csv", "--at-least", "1", "--site", "süd", "--out", "run.toml").exit_code == 2
    assert (here / "run.toml").read_text() == "before"
    shown = call("describe", "data.csv", "--at-least", "1", "--site", "sued")
    assert call("describe", "data.csv", "--at-least", "1", "--site", "sued", "--out", "run.toml").stdout == ""
    assert (here / "run.toml").read_text() == shown.stdout
    call("describe", "data.csv", "--at-least", "1", "--site", "sued", "--json", "--out", "run.json")
    assert json.loads((here / "run.json").read_text())["scenario"]["sites"] == ["sued"]


def test_a_model_that_does_not_fit_is_one_sentence(here: Path) -> None:
    result = call("run", *TOY, "--set", "model.hidden=[10000000,10000000]", "--out", "one")
    assert (result.exit_code, len(sentences_of(result))) == (2, 1)
    assert "takes about 1,600,00" in result.stderr
    assert not (here / "one").exists()


class Blow(Exception):  # noqa: N818
    """What nobody has foreseen."""


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (
            Blow("of\nall"),
            1,
            "this should not happen: Blow: of all. PERENNIAL_DEBUG=1 shows the traceback, in one/trace",
        ),
        (MemoryError(), 2, "there is not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
            2,
            "not enough memory;",
        ),
        (OSError(28, "No space left on device", "x"), 2, "x: No space left on device; one has no checkpoint yet"),
        (KeyboardInterrupt(), 130, "interrupted; one has no checkpoint yet, so start the run again"),
        (UserError("no"), 2, "perennial: no"),
    ],
)
@pytest.mark.parametrize("debug", ["", "1"])
def test_whatever_is_raised_is_a_sentence_and_a_traceback_on_request(
    error: BaseException, code: int, word: str, debug: str, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(LocalRuntime, "run", fail)
    monkeypatch.setenv("PERENNIAL_DEBUG", debug)
    result = call("run", *TOY, "--out", "one")
    assert result.exit_code == code
    assert word in result.stderr
    if debug and code != 130:
        assert result.stderr.count("Traceback (most recent call last)") == 1
        assert "in fail" in result.stderr
    else:
        assert "Traceback" not in result.stderr
    assert len(sentences_of(result)) == 1
    assert (here / "one" / "traceback.txt").exists() == (code == 1)


@pytest.mark.parametrize(
    ("runtime", "word"), [("deployment", "the run goes on at the"), ("simulation", "start the")]
)
def test_a_deployed_run_outlives_the_command_that_watches_it(
    runtime: str, word: str, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    def interrupted(config: Any, path: Path, *_: object, **__: object) -> None:
        RunFolder.create(path, config)
        raise KeyboardInterrupt(*told)

    told: list[str] = []
    monkeypatch.setattr("perennial.server.cli.run.begin", interrupted)
    result = call("run", *TOY, "--runtime", runtime, "--superlink", "127.0.0.1:9", "--insecure", "--out", "one")
    assert result.exit_code == 130, result.output
    assert word in result.stderr
    assert "perennial resume" not in result.stderr
    told.append("run 12 goes on")
    result = call("run", *TOY, "--runtime", runtime, "--superlink", "127.0.0.1:9", "--insecure", "--out", "two")
    assert ("perennial: interrupted; run 12 goes on\n" in result.stderr) == (runtime == "deployment")


def test_what_is_broken_off_names_its_folder_and_what_can_be_done(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RunFolder.save_checkpoint

    def stop(self: RunFolder, *arguments: Any, **named: Any) -> None:
        save(self, *arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save_checkpoint", stop)
    result = call("run", *TOY, "--out", "one")
    assert result.stderr.splitlines()[-1] == (
        "perennial: interrupted; `perennial resume one` continues from the last checkpoint"
    )
    assert "perennial resume one" in call("show", "run", "one").stderr
    shutil.rmtree(here / "one" / "checkpoint")  # as after a full disk before the first one
    for command in (("show", "run", "one"), ("run", *TOY, "--out", "one")):
        said = call(*command).stderr
        assert "perennial resume" not in said
        assert "start it again" in said or "give another --out" in said


def test_a_site_without_test_data_is_named(here: Path) -> None:
    call("run", *TOY, "--rounds", "2", "--out", "one")
    assert "no test data" not in call("show", "run", "one").stdout
    file = here / "one" / "summary.json"
    summary = json.loads(file.read_text())
    for selections in summary["models"].values():
        for found in selections.values():
            found["clients"]["client-2"] = {}
    file.write_text(json.dumps(summary))
    assert "client-2: no test data, so not in any test accuracy" in call("show", "run", "one").stdout


@pytest.mark.parametrize("target", ["/dev/full", "a pipe that nobody reads"])
def test_a_remark_that_cannot_be_written_ends_nothing(target: str) -> None:
    code = "from perennial.server.cli.console import remark; remark('a'); remark('b')"
    if target == "/dev/full":
        writing = os.open(target, os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    ended = subprocess.run([sys.executable, "-c", code], stderr=writing, check=False)
    os.close(writing)
    assert ended.returncode == 0


def test_what_others_have_written_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "no\x1b[2J\x1b]0;owned\x07rth\x9b1m\nperennial: all is well"
    table = Table(title=evil, caption=evil)
    table.add_column(evil)
    table.add_row(evil)
    table.add_row("two\nlines")
    console.remark(evil)
    console.print_tables(table)
    console.print_lines([evil])
    console.err.print(evil)
    shown = capsys.readouterr()
    assert (shown.out + shown.err).replace("\n", "").isprintable()
    assert "owned" not in shown.out + shown.err
    assert shown.err.splitlines()[0] == "perennial: north 1m perennial: all is well"
    assert any("two" in line and "lines" not in line for line in shown.out.splitlines())


def test_names_are_no_markup(here: Path) -> None:
    call("run", *TOY, "--rounds", "2", "--out", "one [b]")
    file = here / "one [b]" / "summary.json"
    file.write_text(file.read_text().replace("p=0.1", "ward [/b]").replace("p=0.9", "ward [red] :x:"))
    shown = call("show", "run", "one [b]")
    assert shown.exit_code == 0, shown.output
    assert "ward [/b] " in shown.stdout
    assert "ward [red] :x: " in shown.stdout
    assert "run folder: one [b]\n" in shown.stdout


def test_also_outside_of_a_commands_own_sentences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["perennial", "list", "models"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    monkeypatch.setattr(show, "Table", None)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert "this should not happen: TypeError" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "name"), [("model", "none"), ("method", "class"), ("scenario", "true")])
def test_a_word_of_python_is_no_name(kind: str, name: str, here: Path) -> None:
    refused = call("new", kind, name)
    assert refused.exit_code == 2
    assert f"name {name!r} is not possible: it is a word of Python itself; give yours" in refused.stderr
    assert not (here / name).exists()


def test_a_name_that_nothing_has_is_not_checked(here: Path) -> None:
    call("new", "method", "my-method")
    for name, sentence in (
        ("my-method", "nothing of the name 'my-method' is installed; first `uv pip install -e my-method`"),
        ("fedvg", "unknown name 'fedvg'; did you mean 'fedavg'? (`perennial list methods`"),
    ):
        refused = call("check", name)
        assert refused.exit_code == 2
        assert sentence in refused.stderr
