"""What a user of MLflow, scikit-learn or Flower types first, without having read a page."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from perennial.common.utils.errors import UserError
from perennial.server import studies
from perennial.server.cli.main import app
from perennial.server.run.folder import RunFolder
from perennial.server.runs import configured

GUESSES: list[tuple[str, int, str]] = [
    ("-h", 0, "reproduce"),
    ("run -h", 0, "Deployment: where the SuperLink is"),
    ("list method", 0, "fedpin"),
    ("show ditto", 0, "proximity"),
    ("show colored-digits", 0, "test environments"),
    ("run ditto --config toy.toml --rounds 1 --out one", 0, "personal"),
    ("show one", 0, "run folder: one"),
    ("run ditto --set lr=0.1", 2, "unknown setting 'lr'; did you mean 'learning_rate'?"),
    ("run ditto --set epochs=2", 2, "unknown setting 'epochs'; did you mean 'local_steps' with local_unit=epoch?"),
    ("compare fedavg ditto", 2, "methods: fedavg, ditto"),  # as `compared` below says
]
"""Command, exit code, what is said; in this order, since the run is shown after it."""


def call(command: str) -> Result:
    return CliRunner().invoke(app, shlex.split(command))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def compared(methods: list[str], **_: Any) -> None:
        raise UserError(f"methods: {', '.join(methods)}")

    monkeypatch.setattr(studies, "compare", compared)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "toy.toml").write_text('[scenario]\nname = "toy"\n')
    return tmp_path


def test_ten_guesses_do_what_is_meant(here: Path) -> None:
    for command, code, said in GUESSES:
        result = call(command)
        assert (result.exit_code, said in result.output) == (code, True), (command, result.output)
    assert RunFolder(here / "one").config().method.name == "ditto"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("run ditto --set lambda=2", "did you mean 'proximity'?"),  # the symbol of the paper
        ("run fedprox --set mu=2", "did you mean 'proximity'?"),
        ("run ditto --set clients=4", "did you mean 'scenario.clients'?"),
        ("run ditto --set proximty=4", "did you mean 'proximity'?"),
        ("run --set qqqq=1", "unknown setting 'qqqq' (fedsdr has "),
        ("run ditto --lr 0.1", "--lr is no option; write --set learning_rate=VALUE"),
        (
            "run ditto --local-epochs 2",
            "--local-epochs is no option; write --set local_steps=VALUE --set local_unit=e",
        ),
        ("run ditto --round 2", "'--rounds'"),
        ("run ditto --method fedavg", "METHOD: ditto is given, and --method fedavg; give one of them"),
        ("run dito", "did you mean 'ditto'?"),
        ("compare ditto,fedavg irm", "methods: ditto, fedavg, irm"),
        ("compare --methods ditto,irm", "methods: ditto, irm"),
        ("compare", "METHOD: name one or more"),
        ("show methods ditto --set a=1", "--scenario and --set go with perennial show model"),
        ("show dito", "no method, scenario, model or run folder 'dito'; did you mean 'ditto'?"),
        ("show method", "NAME: which method?"),
        ("show methd ditto", "THING: unknown thing 'methd'; did you mean 'method'?"),
        ("list modles", "KIND: unknown kind 'modles'; did you mean 'models'?"),
        ("run ditto --metrics accuracy", "--metrics 'accuracy' is no address; write HOST:PORT"),
        ("reproduce --overview --check", "--overview --check: the FILE of --overview is missing"),
        ("run ditto --out --json", "--out --json: the value of --out is missing"),
    ],
)
def test_one_sentence_with_what_is_meant_first(command: str, said: str, here: Path) -> None:
    result = call(command)
    assert (result.exit_code, said in result.stderr) == (2, True), result.output
    assert [path.name for path in here.iterdir()] == ["toy.toml"]


@pytest.mark.parametrize("command", ["run", "tune", "list", "show", "certs"])
def test_help_tells_of_each_argument(command: str) -> None:
    told = {
        "run": "Method, see",
        "tune": "Method, see",
        "list": "What to list",
        "show": "enough alone",
        "certs": "Folder",
    }
    assert told[command] in call(f"{command} -h").output


def test_prometheus_is_named_where_its_options_are() -> None:
    assert "Monitoring with Prometheus" in call("run --help").output


@pytest.mark.parametrize(
    ("rounds", "settings", "every"),
    [(4, [], 1), (10, [], 1), (11, [], 10), (4, ["evaluate_every=3"], 3), (4, ["privacy.mechanism=secagg"], 10)],
)
def test_a_single_short_run_has_a_curve_unless_something_is_said(
    rounds: int, settings: list[str], every: int
) -> None:
    run = configured("fedavg", "colored-digits", rounds=rounds, settings=settings)
    assert run.evaluate_every == every


def test_a_recipe_is_evaluated_as_it_was() -> None:
    assert (
        configured(recipe="demo/fedsdr", rounds=4).evaluate_every
        == configured(recipe="demo/fedsdr").evaluate_every
    )
