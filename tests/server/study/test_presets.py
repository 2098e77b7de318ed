"""Presets: an entry is what a search chose and nothing else, and what is set by hand is stronger."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from split_counts import coloured
from typer.testing import CliRunner

from perennial.common import presets as places
from perennial.common.config import RunConfig, load_config
from perennial.common.data import scenarios
from perennial.common.presets import FILE, Preset, presets, read_presets
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.run.folder import RunFolder
from perennial.server.selection.split_rule import Select
from perennial.server.study.batch import Outcome, Selected, Summary
from perennial.server.study.choose import choose
from perennial.server.study.compare import Plan, base_config, entries_of
from perennial.server.study.presets import _settings, add_preset
from perennial.server.study.sweep import key_of, trial, trials
from perennial.testing.tiny_federation import Toy, toy_config

COLOUR, SHAPE = (0.9, 1.0, 0.0), (0.75, 0.75, 0.72)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    monkeypatch.setitem(scenarios.SCENARIOS, "toy-of-three", Toy(clients=3))


def ended(path: Path, configs: list[RunConfig], *scores: tuple[float, float, float]) -> list[Outcome]:
    """Trials that have ended: held-out accuracy, a and d of each."""
    outcomes = []
    for number, (config, (held_out, a, d)) in enumerate(zip(configs, scores, strict=True)):
        model = config.method.evaluates[-1]
        folder = RunFolder.create(path / f"{config.method.name}-{number}", config)
        folder.append([{**coloured(a, d), "round": config.rounds, "model": model}])
        numbers = {"worst": 0.5, "average": 0.5, "pooled": 0.5, "validation": held_out}
        found = Selected(round=config.rounds, accuracy={"a": 0.5}, clients={"a": {"a": 0.5}}, **numbers)
        outcomes.append(Outcome(config, folder.path, Summary(rounds=6, models={model: {"final": found}})))
    return outcomes


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a preset of Ditto on `toy-of-three`, which is trial 1 of 2."""
    configs = trials(toy_config("ditto", "personal_steps=7"), 2, ["personal_steps"])
    outcomes = ended(tmp_path, configs, COLOUR, SHAPE)
    verdict = choose(outcomes, Select.by_split)
    path = tmp_path / "presets.toml"
    given = ["evaluate_every=2", "checkpoint_every=2", "personal_steps=7"]
    said = add_preset(path, outcomes, verdict, "toy-of-three", given, True)
    assert said == f"written: preset tuned of ditto on toy to {path}"
    monkeypatch.setattr(places, "FILE", path)
    return path


def redrawn(preset: Preset) -> dict[str, Any]:
    """The settings of the preset's trial, drawn anew: what the preset must have."""
    options = {"method": preset.method, "scenario": preset.scenario, "seed": preset.seed, "rounds": preset.rounds}
    base = load_config(options=options, settings=preset.given)
    fixed = {key_of(setting) for setting in preset.given}
    return _settings(trial(base, preset.trial, fixed), fixed)


@pytest.mark.parametrize("entry", sorted(read_presets(FILE)) or [None])
def test_every_entry_is_a_trial_of_its_search(entry: tuple[str, str] | None) -> None:
    if entry is None:
        pytest.skip("there is no preset")
    preset = read_presets(FILE)[entry]
    assert preset.settings == redrawn(preset)
    assert preset.score > preset.constant
    config = load_config(options={"method": preset.method, "scenario": preset.scenario}, settings=["preset=tuned"])
    assert {
        name: value for name, value in config.method.model_dump(mode="json").items() if name in preset.settings
    } == (preset.settings)


def test_what_a_search_chose_is_an_entry_that_can_be_drawn_again(file: Path) -> None:
    (preset,) = presets().values()
    assert (preset.family, preset.trial, preset.trials, preset.score) == ("toy", 1, 2, 0.72)
    assert preset.settings["personal_steps"] == 7
    assert preset.settings == redrawn(preset)
    assert preset.command == (
        "perennial tune ditto --scenario toy-of-three --trials 2 --seed 0 --rounds 6 --set evaluate_every=2 "
        "--set checkpoint_every=2 --set personal_steps=7 --prune"
    )
    rounded = {**preset.settings, "learning_rate": round(preset.settings["learning_rate"], 3)}
    assert rounded != redrawn(preset.model_copy(update={"settings": rounded}))
    assert preset.settings != redrawn(preset.model_copy(update={"seed": 1}))


def test_another_search_of_the_same_method_and_family_takes_its_place(file: Path, tmp_path: Path) -> None:
    for method in ("ditto", "fedavg"):
        outcomes = ended(tmp_path / "again", trials(toy_config(method), 3), COLOUR, COLOUR, SHAPE)
        add_preset(file, outcomes, choose(outcomes, Select.by_split), "toy", [], False)
    assert {key: preset.trial for key, preset in presets().items()} == {("ditto", "toy"): 2, ("fedavg", "toy"): 2}
    assert file.read_text().startswith("# Settings that `perennial tune")


def test_what_split_did_not_choose_is_no_preset(file: Path, tmp_path: Path) -> None:
    before = file.read_text()
    configs = trials(toy_config("ditto"), 2)
    outcomes = ended(tmp_path / "more", configs, SHAPE, COLOUR)
    for select, why in ((Select.by_split, "chose the defaults"), (Select.held_out, "did not choose")):
        verdict = choose(outcomes, select)
        said = add_preset(file, outcomes, verdict, "toy", [], True)
        assert said == f"no preset is written to {file}, since split {why}"
    assert file.read_text() == before


def test_a_file_that_cannot_take_a_preset_is_told_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text("rounds = 3\n")
    search = ["tune", "fedavg", "--trials", "2", "--rounds", "1", "--preset-out"]
    for rest, sentence in (
        (["none/x.toml", "--scenario", "colored-digits"], "there is no folder none"),
        (["own.toml", "--scenario", "colored-digits"], "it has 'rounds', so it is another kind of file"),
        (
            ["x.toml", "--scenario", "colored-digits", "--optimizers", "sgd,adam"],
            "not possible with another optimizer",
        ),
        (
            ["x.toml", "--scenario", "colored-digits", "--set", "optimizer=adam"],
            "not possible with another optimizer",
        ),
        (["x.toml", "--config", "own.toml"], "--preset-out is not possible with --config"),
    ):
        told = CliRunner().invoke(app, [*search, *rest])
        assert told.exit_code == 2
        assert sentence in told.output
    assert [own.name for own in tmp_path.iterdir()] == ["own.toml"]


def method_of(*settings: str, **options: Any) -> dict[str, Any]:
    options = {"method": "ditto", "scenario": "toy", **options}
    return load_config(options=options, settings=settings).method.model_dump()


def test_what_is_set_by_hand_is_stronger(file: Path, tmp_path: Path) -> None:
    (preset,) = presets().values()
    tuned, plain = method_of("preset=tuned"), method_of()
    assert tuned == plain | preset.settings
    assert tuned["learning_rate"] != plain["learning_rate"]
    assert method_of("preset=tuned", "learning_rate=0.5") == tuned | {"learning_rate": 0.5}
    config = tmp_path / "own.toml"
    config.write_text('preset = "tuned"\nscenario = "toy"\n[method]\nname = "ditto"\nproximity = 0.25\n')
    assert load_config(config).method.model_dump() == tuned | {"proximity": 0.25}
    config.write_text('scenario = "toy"\n[method]\nname = "ditto"\npreset = "tuned"\n')
    assert load_config(config).method.model_dump() == tuned
    whole = load_config(options={"method": "ditto", "scenario": "toy"}, settings=["preset=tuned"])
    (tmp_path / "whole.toml").write_text(whole.toml())
    assert load_config(tmp_path / "whole.toml") == whole
    assert "preset" not in whole.toml()


def test_a_method_with_presets_of_its_own_has_them_still(file: Path, tmp_path: Path) -> None:
    assert method_of("preset=code", method="irm")["preset"] == "code"
    with pytest.raises(
        UserError, match=r"unknown preset 'cod'; did you mean 'code'\? \(there are: code, paper, tun"
    ):
        method_of("preset=cod", method="irm")
    outcomes = ended(tmp_path / "irm", trials(toy_config("irm", "preset=code"), 2), COLOUR, SHAPE)
    add_preset(file, outcomes, choose(outcomes, Select.by_split), "toy", ["preset=code"], True)
    found = method_of("preset=tuned", method="irm")
    assert found["preset"] == "code"
    assert found == method_of("preset=code", method="irm") | presets()["irm", "toy"].settings


@pytest.mark.parametrize(
    ("method", "setting", "sentence"),
    [
        (
            "ditto",
            "preset=tuend",
            r"^preset: unknown preset 'tuend'; did you mean 'tuned'\? \(there are: tuned\)$",
        ),
        ("ditto", "preset=[1]", r"^preset: unknown preset '\[1\]' "),
        (
            "fedavg",
            "preset=tuned",
            r"^preset: fedavg has no preset 'tuned' for toy \(there are: ditto on toy\); a file ",
        ),
    ],
)
def test_a_preset_that_is_not_there(method: str, setting: str, sentence: str, file: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        method_of(setting, method=method)


def test_a_comparison_gives_it_to_the_methods_that_have_one(file: Path) -> None:
    entries = entries_of(["ditto", "fedavg", "irm"])
    plan = Plan(entries, "toy", seeds=1, settings=("preset=tuned", "batch_size=20"))
    ditto, fedavg, irm = (base_config(plan, entry, entries).method.model_dump() for entry in entries)
    (preset,) = presets().values()
    assert ditto["learning_rate"] == preset.settings["learning_rate"]
    assert ditto["batch_size"] == fedavg["batch_size"] == irm["batch_size"] == 20
    assert fedavg["learning_rate"] == method_of(method="fedavg")["learning_rate"]
    alone = entries_of(["fedavg"])
    with pytest.raises(UserError, match="fedavg has no preset"):
        base_config(Plan(alone, "toy", seeds=1, settings=("preset=tuned",)), alone[0], alone)


def test_show_says_how_it_was_found(file: Path) -> None:
    (preset,) = presets().values()
    shown = " ".join(CliRunner().invoke(app, ["show", "method", "ditto"]).output.split())
    assert "preset=tuned on toy: " in shown
    assert f"learning_rate={preset.settings['learning_rate']}" in shown
    assert "split: 72.00 % (standard error 2.75; the best constant has 50.00 %), trial 1 of 2" in shown
    assert f"{preset.command} (code {preset.code})" in shown
    data = json.loads(CliRunner().invoke(app, ["show", "method", "ditto", "--json"]).output)
    assert data["tuned"][0]["settings"] == preset.settings
    assert "preset=tuned" not in CliRunner().invoke(app, ["show", "method", "fedavg"]).output


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('method = "ditto"', 'method = "dito"'),
        ('scenario = "toy-of-three"', 'scenario = "tow"'),
        ('by = "split"', 'by = "oracle"'),
        ("trial = 1", "trial = 0"),
        ("score = 0.72", "score = 72"),
        ("[[tuned]]", "[tuned]"),
        ("prune = true", "prune = true\nfound = 1"),
        ("[[tuned]]", "[[tuned"),
    ],
)
def test_a_file_that_does_not_fit_is_one_sentence(good: str, bad: str, file: Path) -> None:
    assert good in file.read_text()
    file.write_text(file.read_text().replace(good, bad, 1))
    read_presets.cache_clear()
    with pytest.raises(UserError, match=r"presets\.toml: ") as caught:
        presets()
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_one_with_two_of_a_kind(file: Path) -> None:
    entry = tomllib.loads(file.read_text())["tuned"][0]
    assert Preset.model_validate(entry).family == "toy"
    text = file.read_text()
    file.write_text(text + text[text.index("[[tuned]]") :])
    read_presets.cache_clear()
    with pytest.raises(UserError, match="two entries are of the same method and family"):
        presets()
    file.unlink()
    read_presets.cache_clear()
    with pytest.raises(UserError, match="No such file"):
        presets()


def test_a_configuration_is_no_file_of_presets(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("rounds = 3\n")
    with pytest.raises(UserError, match=r"run\.toml: it has 'rounds', so it is another kind of file"):
        read_presets(tmp_path / "run.toml")
