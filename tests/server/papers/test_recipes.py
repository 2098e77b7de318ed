"""Recipes: one run with what the reproduction of a paper's row uses, and sentences for what is no recipe."""

from pathlib import Path

import pytest

from perennial.common.data import scenarios
from perennial.common.utils.errors import UserError
from perennial.server.papers import reproduce
from perennial.server.papers.demo import load_claims
from perennial.server.papers.recipes import recipe_config, recipes
from perennial.server.study.compare import base_config, with_baselines
from perennial.testing.tiny_federation import Toy


@pytest.fixture(autouse=True)
def toy_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy scenario by name."""
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())


ROWS = """
title = "T"
source = "S"
scenario = "toy"
rounds = 4
seeds = 2
trials = 1
columns = ["worst"]

[settings]
local_steps = 2
proximity = 3.0

[quick]
rounds = 2

[[rows]]
title = "Ditto†, (λ = 3), twice"
method = "ditto"
model = { hidden = [5] }

[[rows]]
title = "Tomorrow"
method = "tomorrow"
"""
SECOND = '\n[[rows]]\ntitle = "Ditto†"\nmethod = "ditto"\nsettings = { proximity = 0.5 }\n'


@pytest.mark.parametrize("name", sorted(reproduce.reproductions()))
def test_a_recipe_is_the_reproductions_configuration(name: str) -> None:
    table = reproduce.load_reproduction(name)
    plan = table.plan(quick=False)
    entries = with_baselines(plan.entries)
    assert list(recipes(tables=[name])) == [f"{name}/{reproduce.row_name(entry.label)}" for entry in plan.entries]
    for entry in plan.entries:
        planned = base_config(plan, entry, entries)
        for title in (entry.label, entry.label.upper(), reproduce.row_name(entry.label)):
            config, caution = recipe_config(f"{name}/{title}", {}, [])
            assert config == planned
            assert (f"({table.trials} trials)" in caution) == (table.trials > 1)


def test_a_recipe_is_the_row_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(ROWS + SECOND)
    config, caution = recipe_config("t/ditto-λ-3-twice", {}, [], tmp_path)
    values = config.model_dump()
    assert (config.method.name, config.scenario.name, values["model"]["hidden"]) == ("ditto", "toy", (5,))
    assert (values["method"]["proximity"], values["method"]["local_steps"], values["rounds"]) == (3.0, 2, 4)
    assert (values["seed"], caution) == (0, "")
    own = recipe_config("t/Ditto†", {}, [], tmp_path)[0].model_dump()
    assert (own["method"]["proximity"], own["model"]["hidden"]) == (0.5, (8,))


def test_a_recipe_whose_settings_were_seen_on_test_data_says_so(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(ROWS.replace("[[rows]]", "[[rows]]\nseen = true", 1) + SECOND)
    recipe, why = (
        "t/ditto-λ-3-twice",
        "were chosen while looking at test data, so its numbers may be too good (t.toml)",
    )
    assert recipe_config(recipe, {}, [], tmp_path)[1] == f"settings of {recipe} {why}"
    assert recipe_config("t/ditto", {}, [], tmp_path)[1] == ""
    assert recipes(["cmnist-8"])["cmnist-8/FedSDR"].endswith("; settings seen on test data")
    assert "seen" not in recipes(["cmnist-8"])["cmnist-8/FedAvg"]


def test_every_row_that_says_that_its_settings_were_chosen_on_test_data_is_marked() -> None:
    tables = map(reproduce.load_reproduction, reproduce.reproductions())
    said = [row for table in tables for row in table.rows if "chosen on test environments" in row.remark]
    assert len(said) == 10
    assert all(row.seen for row in said)


def test_the_command_line_is_stronger(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(ROWS + SECOND)
    options = {"rounds": 7, "seed": 3, "data_root": "there", "device": None}
    settings = ["proximity=9.0", "local_steps=1", "model.hidden=[6]", "scenario.clients=2"]
    values = recipe_config("t/Ditto", options, settings, tmp_path)[0].model_dump()
    assert (values["rounds"], values["seed"], values["data_root"], values["device"]) == (7, 3, "there", "auto")
    assert (values["method"]["proximity"], values["method"]["local_steps"]) == (9.0, 1)
    assert (values["model"]["hidden"], values["scenario"]["clients"]) == ((6,), 2)
    with pytest.raises(UserError, match="rounds: 0 is not possible"):
        recipe_config("t/Ditto", {"rounds": 0}, [], tmp_path)


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ("u", r"--recipe: unknown table 'u'.*\(there are: t\)"),
        ("T/Ditto", r"unknown table 'T'; did you mean 't'\?"),
        ("t", r"--recipe t needs a row of the table: t/Ditto-λ-3-twice, t/Ditto$"),
        ("t/", r"--recipe t needs a row"),
        ("t/dito", r"t: unknown row 'dito'; did you mean 'Ditto'\? \(there are: Ditto, Ditto-λ-3-twice\)"),
        ("t/Tomorrow", r"unknown row 'Tomorrow'"),
        ("t/†", r"unknown row '†'"),
    ],
)
def test_what_is_no_recipe_is_one_sentence(recipe: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(ROWS + SECOND)
    with pytest.raises(UserError, match=sentence) as caught:
        recipe_config(recipe, {}, [], tmp_path)
    assert "\n" not in str(caught.value)


def test_a_table_of_one_row_needs_no_row(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(ROWS)
    assert recipe_config("t", {}, [], tmp_path) == recipe_config("t/Ditto-λ-3-twice", {}, [], tmp_path)


def test_rows_that_the_command_line_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(ROWS + SECOND + SECOND.replace("Ditto†", "DITTO"))
    with pytest.raises(UserError, match="two rows have the title 'Ditto†', or differ in signs and capitals alone"):
        reproduce.load_reproduction("t", tmp_path)


def test_the_claims_of_the_demo_are_recipes() -> None:
    claims = load_claims()
    assert list(recipes(tables=["demo"])) == [f"demo/{claim.method.name}" for claim in claims]
    assert set(recipes(tables=["demo"])) < set(recipes())
    for claim in claims:
        config, caution = recipe_config(f"demo/{claim.method.name}", {"seed": 2}, ["quorum=0.75"])
        assert config == claim.config(claim.method, {"seed": 2}).model_copy(update={"quorum": 0.75})
        looked = "looking at test environments" in claim.found and "set on other data" not in claim.found
        assert ("test data" in caution) == claim.seen == looked
    assert any(claim.seen for claim in claims)
    assert not all(claim.seen for claim in claims)
    for recipe, words in (("demo", "demo/fedsdr"), ("demo/fedsrd", "did you mean 'fedsdr'")):
        with pytest.raises(UserError, match=words):
            recipe_config(recipe, {}, [])
