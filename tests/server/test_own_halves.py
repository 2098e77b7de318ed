"""What a plug-in's halves do wrong is said of them, in a sentence, and at once."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plugin_packages import CLIENT, METHOD, SCENARIO, SETTINGS, unloaded, write
from tiny_runs import broken_off
from typer.testing import CliRunner

from perennial.common import plugins
from perennial.common.config import RunConfig
from perennial.common.utils.errors import RunStopped, UserError
from perennial.server.app import serve
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config

HEAD = (
    "import torch\nfrom perennial.common.wire import MODEL\nfrom perennial.strategies.base import MethodStrategy\n"
)
SERVER = "\n\nclass MyServer(MethodStrategy):\n    "


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in, and nothing left of what a test has loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(plugins.VARIABLE, "")
    with unloaded():
        yield tmp_path


def config(folder: Path, client: str = "", server: str = "", **options: Any) -> RunConfig:
    """A run of a method whose halves have these lines."""
    own = CLIENT + client.replace("\n", "\n    ") if client else CLIENT
    write(folder, "my_method", HEAD + SETTINGS + own + (SERVER + server.replace("\n", "\n    ") if server else ""))
    size = {"rounds": 2, "plugins": ["my_method"], **options}
    return toy_config("my-prox", "checkpoint_every=1", "quorum=1", **size)


def run(found: RunConfig) -> dict[str, Any]:
    return LocalRuntime(found).run(RunFolder.create(Path("run"), found))


UPDATE = "def update(self, model, means):\n    return {name: %s for name, tensor in means[MODEL].items()%s}"
NOT_LIKE = "round 1: the server half of 'my-prox' gave a model that is not like the one before: 'model'"


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (UPDATE % ("tensor", " if name != 'classifier.bias'"), f"{NOT_LIKE} lacks classifier.bias"),
        (UPDATE % ("tensor[:1]", ""), f"{NOT_LIKE}: featurizer.1.weight has shape (1, 2) instead of (8, 2)"),
        (UPDATE % ("tensor.double()", ""), f"{NOT_LIKE}: featurizer.1.weight has type float64 instead of float32"),
        (UPDATE % ("0.5", ""), "its model: 'featurizer.1.weight' is of type float, which is not possible"),
        (
            "def weight(self, reply):\n    return 0.0",
            "'my-prox': weight: 0 is not possible for all who sent 'model'",
        ),
        (
            "def weight(self, reply):\n    return -1.0",
            "weight: -1.0 is not possible for client-0; it must be 0 or",
        ),
        ("def state_dict(self):\n    return {'n': 3}", "state_dict: 'n' is of type int, which is not possible"),
        ("def state_dict(self):\n    return {'n': {'v': 3}}", "state_dict: 'n': 'v' is of type int, which is not"),
        ("def state_dict(self):\n    return {'a/b': {}}", "state_dict: a record's name 'a/b' is not possible; it"),
    ],
)
def test_what_a_server_half_makes_must_fit(server: str, words: str, folder: Path) -> None:
    with pytest.raises(UserError) as error:
        run(config(folder, server=server))
    assert words in str(error.value)
    assert "the server half of 'my-prox'" in str(error.value)


def test_a_server_half_that_diverges_stops_the_run(folder: Path) -> None:
    with pytest.raises(
        RunStopped, match="round 1: the server half of 'my-prox' gave a model that no client can use"
    ):
        run(config(folder, server=UPDATE % ("tensor / 0", ""), rounds=1))


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("['by/round'] = {'n': torch.ones(1)}", "a record's name 'by/round' is not possible; it must have no '/'"),
        ("['flag'] = {}", "'flag' holds nothing; keep a tensor in it, or leave it out"),
        ("['n'] = 3", "'n' is of type int, which is not possible; it must be tensors by name"),
        ("['n'] = {'v': 3}", "'n': 'v' is of type int, which is not possible; it must be a tensor"),
    ],
)
def test_what_a_client_keeps_must_come_back_from_a_file(kept: str, words: str, folder: Path) -> None:
    client = f"\ndef train(self, received):\n    self.kept{kept}\n    return super().train(received)\n"
    with pytest.raises(UserError) as error:
        run(config(folder, client))
    assert str(error.value) == f"the client half of 'my-prox': self.kept: {words}"


def test_a_record_of_the_server_s_that_is_empty_is_there_again_after_a_resume(folder: Path) -> None:
    state = "def state_dict(self):\n    return {'velocity': {}}\ndef load_state_dict(self, state):\n    "
    found = config(folder, server=f"{state}    assert state['velocity'] == {{}} and 'other' not in state")
    path, origin = broken_off(found, folder / "run", 1)
    assert LocalRuntime(found).run(path, origin)["rounds"] == 2


IN_PLACE = "make a new record of new tensors"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("received[MODEL]['classifier.bias'].mul_(2)", "received['model'] in place in 'train'"),
        ("self.kept['n']['v'] += 1", "self.kept['n'] in place in 'train'"),
        ("self.kept['n']['v'] = self.kept['n']['v'] + 1", "self.kept['n'] in place in 'train'"),
        ("self.kept['n']['more'] = torch.ones(1)", "self.kept['n'] in place in 'train'"),
    ],
)
def test_a_client_half_may_not_change_in_place_what_is_not_its_own(line: str, words: str, folder: Path) -> None:
    first = "if 'n' not in self.kept:\n        self.kept['n'] = {'v': torch.zeros(2)}\n    "
    client = f"\ndef train(self, received):\n    {first}{line}\n    return super().train(received)\n"
    with pytest.raises(UserError) as error:
        run(config(folder, client))
    assert str(error.value) == f"the client half of 'my-prox' changes {words}; {IN_PLACE}"


def test_a_client_half_may_put_tensors_of_its_own_into_what_it_received(folder: Path) -> None:
    line = "received[MODEL]['classifier.bias'] = received[MODEL]['classifier.bias'] * 2"
    run(config(folder, f"\ndef train(self, received):\n    {line}\n    return super().train(received)\n"))


def test_a_server_half_may_not_change_in_place_what_is_under_way(folder: Path) -> None:
    server = """def training_payload(self, model):
    self.count = getattr(self, 'count', torch.zeros(1))
    return {MODEL: model, 'count': {'n': self.count}}
def expect(self, model):
    return {MODEL: model}
def weight(self, reply):
    self.count += 1
    return 1.0"""
    with pytest.raises(UserError) as error:
        run(config(folder, server=server))
    assert str(error.value) == f"the server half changes 'count' in place while 'train' is under way; {IN_PLACE}"


RAISES = "def update(self, model, means):\n    return means['modell']"


def test_what_a_server_half_raises_is_said_of_the_plug_in(folder: Path) -> None:
    found = config(folder, server=RAISES)
    line = (folder / "my_method.py").read_text().splitlines().index("        return means['modell']") + 1
    with pytest.raises(UserError) as error:
        run(found)
    said = f"plug-in 'my_method' raised KeyError: 'modell' (my_method.py, line {line})"
    assert str(error.value) == f"{said}; run/traceback.txt has its traceback"
    assert "means['modell']" in (folder / "run" / "traceback.txt").read_text()


@pytest.mark.filterwarnings("ignore:Field name:UserWarning")
def test_what_a_plug_in_raises_before_the_run_ends_in_a_sentence(folder: Path) -> None:
    write(folder, "my_data", SCENARIO + "\n    def client_data(self, *_):\n        return self.nothing\n")
    write(folder, "my_method", METHOD + "MyProx.misfit = lambda *_: 1 / 0\n")
    for own, words in (
        ("--scenario my-digits --plugin my_data", "AttributeError"),
        ("--method my-prox", "ZeroDiv"),
    ):
        asked = ["run", "--out", "run", "--plugin", "my_method", *own.split()]
        result = CliRunner().invoke(app, asked)
        assert result.exit_code == 2, result.output
        assert f"raised {words}" in result.output
        assert "PERENNIAL_DEBUG=1 shows the traceback" in result.output
        assert "this should not happen" not in result.output


@pytest.mark.parametrize("ours", [False, True])
def test_a_server_app_leaves_a_word_and_a_traceback_whatever_is_raised(
    ours: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who started the run through Flower waits, and finds nothing."""
    found, here = config(folder, server="" if ours else RAISES), folder / "run"
    runtime = LocalRuntime(found)
    monkeypatch.setattr("perennial.server.run.loop.summarise", lambda *_, **__: {}["ours"])
    settings = {"config": found.model_dump_json(), "out": str(here), "resume": "", "desk": ""}
    grid: Any = runtime.grid
    grid.inner = None  # none of Flower's
    with pytest.raises((UserError, KeyError)):
        serve(grid, settings)
    word = (here / "error.txt").read_text()
    said = "this should not happen: KeyError: 'ours'" if ours else "plug-in 'my_method' raised KeyError: 'modell'"
    assert word.startswith(said)
    assert word.endswith(f"{here}/traceback.txt has its traceback\n")
    assert "KeyError" in (here / "traceback.txt").read_text()


def test_a_server_app_sends_where_it_may_not_look_and_goes_on_with_the_configuration_that_was_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below another user's home."""
    found, here, desk, stat = config(folder), folder / "run", "/home/alice/run/.run.desk-1", os.stat
    grid: Any = LocalRuntime(found).grid
    grid.inner = SimpleNamespace(_stub=None)
    sent = list[Path]()
    monkeypatch.setattr("perennial.server.app.in_simulation", lambda _: False)
    monkeypatch.setattr("perennial.server.app.sending", lambda _, path: nullcontext(sent.append(path)))

    def closed(path: Any, *more: Any, **others: Any) -> os.stat_result:
        if path == desk:
            raise PermissionError(13, "Permission denied", desk)
        return stat(path, *more, **others)

    monkeypatch.setattr(os, "stat", closed)
    monkeypatch.setattr("perennial.server.app.default_out", lambda _: here)
    settings = {"config": found.model_dump_json(), "out": "elsewhere", "resume": "", "desk": desk}
    serve(grid, settings)
    serve(grid, {**settings, "resume": str(here)})
    assert sent == [here, here]
    longer = found.model_copy(update={"rounds": found.rounds + 2}).model_dump_json()
    with pytest.raises(UserError) as error:
        serve(grid, {**settings, "config": longer, "resume": str(here)})
    said = f"config.toml: rounds is {found.rounds + 2} where the run is followed, and {found.rounds} in {here}"
    assert str(error.value) == f"{said} at the server; write the same in both"
    assert (here / "error.txt").read_text().startswith(said)


def test_a_setting_of_a_request_must_travel(folder: Path) -> None:
    with pytest.raises(UserError, match="'my-prox': setting 'rate' must be a number, a text or a list of them"):
        run(config(folder, server="def settings(self, number):\n    return {'rate': torch.ones(1)}"))
