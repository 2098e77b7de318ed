"""The examples of a method of one's own, and of a plain Flower app."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from plain_app import PlainGrid
from plugin_packages import unloaded
from safetensors.torch import load_file
from typer.testing import CliRunner

from perennial.common import plugins
from perennial.server.cli.main import app
from perennial.server.run.grid import LocalGrid

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_method_in_a_package_of_its_own_is_fedprox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.chdir(EXAMPLES / "own-method")
    few = ["--rounds", "2", "--set", "scenario.clients=2", "--scenario", "colored-digits"]
    with unloaded():
        own = ["--plugin", "my_fedprox", "--method", "my-fedprox"]
        for name, chosen in (("own", own), ("ours", ["--method", "fedprox"])):
            done = CliRunner().invoke(app, ["run", *chosen, *few, "--out", str(tmp_path / name)])
            assert done.exit_code == 0, done.output
    one, other = (load_file(tmp_path / name / "models" / "global.safetensors") for name in ("own", "ours"))
    assert all(one[key].equal(other[key]) for key in one)


def test_the_plain_flower_app_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "plain-flower"))
    monkeypatch.chdir(tmp_path)
    try:
        from plain import client, server  # type: ignore[import-not-found]

        settings = {"num-server-rounds": 5, "penalty": 0.01}
        server.app(LocalGrid(client.app, 4), Context(1, 0, {}, RecordDict(), settings))
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "plain"]:
            del sys.modules[name]
    assert (tmp_path / "plain.pt").is_file()
    assert float(capsys.readouterr().out.rpartition("test accuracy:")[2].split()[0]) > 0.3


@pytest.mark.skipif(not shutil.which("patch"), reason="needs the program patch")
def test_flowers_template_becomes_invariant_by_three_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The app as it is and with the diff, whose lines the page shows."""
    example = EXAMPLES / "flower-template"
    diff = (example / "invariant.diff").read_text()
    changed = re.findall(r"(?m)^([-+])(?![-+])(.*)$", diff)
    assert [sign for sign, _ in changed].count("-") == 3
    added = [line for sign, line in changed if sign == "+"]
    assert added.pop(0) == "import perennial"
    page = (example / "README.md").read_text()
    assert [line for line in added if f"+{line}\n" in page] == added
    said = {}
    for name in ("plain", "invariant"):
        folder = tmp_path / name
        shutil.copytree(example, folder)
        if name == "invariant":
            subprocess.run(["patch", "-p1", "--silent"], input=diff, text=True, cwd=folder, check=True)
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(folder))
            patched.chdir(folder)
            try:
                from quickstart import client_app, server_app  # type: ignore[import-not-found]

                settings = {"num-server-rounds": 3, "learning-rate": 0.1, "local-epochs": 1}
                grid = PlainGrid(client_app.app, 4)
                for context in grid.contexts.values():
                    context.run_config = settings
                server_app.app(grid, Context(1, 0, {}, RecordDict(), settings))
            finally:
                for module in [module for module in sys.modules if module.partition(".")[0] == "quickstart"]:
                    del sys.modules[module]
        assert (folder / "final_model.pt").is_file()
        said[name] = capsys.readouterr().out
    assert "'eval_acc'" in said["plain"]
    accuracy = re.search(r"'global/accuracy': ([\d.]+)", said["invariant"])
    assert accuracy
    assert float(accuracy[1]) > 0.55
