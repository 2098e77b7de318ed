"""Defaults < file < command line < --set, and back again through TOML and JSON."""

from pathlib import Path

import pytest

from perennial.common.config import RunConfig, load_config, parse_task
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.data.scenarios.colored import CMNIST
from perennial.common.methods.fedprox import FedProx
from perennial.common.methods.fedsdr import FedSDR
from perennial.common.utils.errors import UserError


def test_defaults_are_complete() -> None:
    config = load_config()
    assert config.method == FedSDR()
    assert config.scenario.name == "colored-digits"
    assert (config.rounds, config.participation) == (config.scenario.rounds, config.scenario.participation)
    assert config.model.model_dump() == {**config.model.model_dump(), **config.scenario.model}


def test_preset_gives_its_participation_and_a_setting_overrides_it() -> None:
    assert load_config(options={"scenario": "cmnist-80"}).participation == 0.1
    assert load_config(options={"scenario": "cmnist"}, settings=["scenario.clients=80"]).participation == 0.1
    assert load_config(options={"scenario": "cmnist-80"}, settings=["participation=0.5"]).participation == 0.5
    assert load_config(options={"scenario": "cmnist-oracle"}).scenario == CMNIST(oracle=True)


@pytest.mark.parametrize("scenario", ["colored-digits", "cmnist-80-oracle", "rc-fmnist"])
def test_toml_round_trip(scenario: str, tmp_path: Path) -> None:
    config = load_config(
        options={"method": "ditto", "scenario": scenario, "seed": 3},
        settings=["proximity=0.7", "model.hidden=[5, 6]"],
    )
    path = tmp_path / "config.toml"
    path.write_text(config.toml())
    assert load_config(path) == config


def test_task_is_what_clients_need_and_no_more() -> None:
    config = load_config(options={"data_root": "/secret/place"})
    assert "/secret/place" not in config.task()
    task = parse_task(config.task())
    assert (task.method, task.scenario, task.model, task.seed) == (
        config.method,
        config.scenario,
        config.model,
        config.seed,
    )
    assert parse_task(config.task()) is task


def test_method_on_the_command_line_replaces_the_files_method_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[method]\nname = "ditto"\nproximity = 2.0\n')
    assert load_config(path, {"method": "fedavg"}).method.name == "fedavg"


def test_another_model_drops_the_scenarios_settings() -> None:
    for config in (load_config(options={"model": "logistic"}), load_config(settings=["model.name=logistic"])):
        assert config.model.model_dump() == {"name": "logistic"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["oracle=true"], ["unknown setting 'oracle'"]),
        (["scenario.oracle=perhaps"], ["scenario.oracle", "perhaps"]),
        (["scenario.colour=1"], ["scenario.colour", "no such setting"]),
        (["participation=0"], ["participation", "greater than 0"]),
        (["learning_rate=-1", "momentum=2"], ["method.learning_rate", "and 1 more"]),
        (
            ["test_sites=[client-0]"],
            ["--set test_sites: [client-0] is no list", """--set 'test_sites=["a", "b"]'"""],
        ),
        (
            ["test_sites=client-0"],
            ["""test_sites: 'client-0' is not possible; write a list, such as ["a", "b"] or [1, 2]"""],
        ),
        (["learning_rate=nan"], ["method.learning_rate: nan is not possible; it must be a number"]),
    ],
)
def test_sentences(settings: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_config(settings=settings)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------- a file, and another method or scenario


def loaded(
    file: Path, text: str, settings: tuple[str, ...] = (), **options: object
) -> tuple[RunConfig, list[str]]:
    file.write_text(text)
    said: list[str] = []
    return load_config(file, options, settings, said.append), said


@pytest.mark.parametrize(
    "scenario", ["scenario = 'colored-digits'", '[scenario]\nname = "colored-digits"\nclients = 4']
)
def test_the_files_own_names_keep_its_tables(scenario: str, tmp_path: Path) -> None:
    text = f'rounds = 7\n{scenario}\n[method]\nname = "ditto"\nproximity = 2.0\n'
    config, said = loaded(tmp_path / "a.toml", text, method="ditto", scenario="colored-digits")
    assert config == load_config(tmp_path / "a.toml")
    assert config.method.model_dump()["proximity"] == 2.0
    assert said == []


def test_another_method_takes_its_own_table_and_leaves_the_rest(tmp_path: Path) -> None:
    text = (
        'rounds = 7\n[method]\nname = "ditto"\nproximity = 2.0\n[scenario]\nname = "colored-digits"\nclients = 4\n'
    )
    config, said = loaded(tmp_path / "a.toml", text, method="fedprox")
    assert config.method == FedProx()
    assert (config.rounds, config.scenario.clients) == (7, 4)
    assert said == [f"of {tmp_path / 'a.toml'}, not used with --method fedprox: [method] ditto"]


def test_another_scenario_than_a_complete_files_comes_with_its_own_sizes(tmp_path: Path) -> None:
    complete = load_config(options={"method": "fedprox"}, settings=["proximity=3", "seed=5"]).toml()
    config, said = loaded(tmp_path / "a.toml", complete, scenario="synthetic-scm")
    plain = load_config(options={"scenario": "synthetic-scm", "method": "fedprox"}, settings=["proximity=3"])
    assert (config.rounds, config.participation, config.model) == (600, 0.1, plain.model)
    assert (config.scenario, config.method, config.seed) == (plain.scenario, plain.method, 5)
    assert said == [
        f"of {tmp_path / 'a.toml'}, not used with --scenario synthetic-scm: "
        "[scenario] colored-digits, rounds = 60, participation = 1.0, [model] mlp"
    ]


def test_what_the_command_line_sets_is_stronger_than_another_scenarios_sizes(tmp_path: Path) -> None:
    settings = ("participation=0.5", "model.hidden=[9]")
    config, said = loaded(tmp_path / "a.toml", load_config().toml(), settings, scenario="synthetic-scm", rounds=3)
    assert (config.rounds, config.participation) == (3, 0.5)
    assert config.model.model_dump() == {**config.model.model_dump(), **config.scenario.model, "hidden": (9,)}
    assert "rounds" not in said[0]


def test_a_complete_file_of_a_preset_is_of_that_name(tmp_path: Path) -> None:
    complete = load_config(options={"scenario": "cmnist-80", "rounds": 9}).toml()
    config, said = loaded(tmp_path / "a.toml", complete, scenario="cmnist-80")
    assert (config.rounds, said) == (9, [])
    config, said = loaded(tmp_path / "a.toml", complete, scenario="cmnist-80-oracle")
    assert (config.scenario, config.rounds) == (SCENARIOS["cmnist-80-oracle"], config.scenario.rounds)
    assert len(said) == 1


def test_a_file_without_a_scenario_keeps_its_rounds(tmp_path: Path) -> None:
    config, said = loaded(tmp_path / "a.toml", "rounds = 7\n", scenario="synthetic-scm")
    assert (config.rounds, said) == (7, [])


# ---------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "has no settings"),
        ("# nothing\n", "has no settings"),
        (
            '[method]\nnme = "fedavg"\n',
            "method: the table [method] needs a name; it has 'nme'; did you mean 'name'?",
        ),
        ('[scenario]\nnamr = "cmnist"\n', "scenario: the table [scenario] needs a name; it has 'namr'"),
        ("[method]\nproximity = 1.0\n", "method: the table [method] needs a name"),
        ('[methd]\nname = "fedavg"\n', "methd: there is no such setting; did you mean 'method'?"),
        (
            '[method]\nname = "ditto"\nproximty = 1.0\n',
            "method.proximty: there is no such setting; did you mean 'prox",
        ),
        (
            '[scenario]\nname = "own-data"\n[scenario.columns]\nage = { kind = "number" }\nrounds = 3\n',
            "scenario.columns.rounds: 3 is not possible; it must be names with values; a setting of the run "
            "stands above the first [table], or has no dot in --set",
        ),
        (
            '[method]\nname = "fedavg"\nseed = 3\n',
            "method.seed: there is no such setting; a setting of the run stands above the first [table], or",
        ),
        (
            '[scenario]\nname = "own-data"\nlabels = ["no"]\n',
            "scenario.labels: ['no'] is not possible",
        ),
        ("x = " + 5000 * "[", "is nested too deeply"),
        ("nodes." + 5000 * "a." + "a = 1", "nested too deeply"),
        ("rounds = " + 5000 * "9", "is not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_is_one_sentence(text: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        loaded(tmp_path / "a.toml", text)
    assert word in str(error.value)
    assert len(str(error.value)) < 500


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As Windows' Notepad writes one."""
    file = tmp_path / "a.toml"
    file.write_text("rounds = 3\n", encoding="utf-8-sig")
    assert load_config(file).rounds == 3
    file.write_text("rounds = 3\n", encoding="utf-16")
    with pytest.raises(UserError, match=r"a\.toml is not UTF-8; save it as UTF-8"):
        load_config(file)


@pytest.mark.parametrize("part", ["method", "scenario"])
def test_a_name_is_no_setting_and_not_listed(part: str) -> None:
    for key in (part, f"{part}.name"):
        with pytest.raises(UserError, match=f"--set {key} is not possible; choose it with --{part}"):
            load_config(settings=[f"{key}=fedavg"])
    with pytest.raises(UserError) as error:
        load_config(settings=["nothing=1"])
    assert f"{part}.name" not in str(error.value)


def test_a_client_can_be_bound_by_a_setting() -> None:
    config = load_config(settings=["nodes.client-0=3", "nodes.client-1=4"])
    assert config.nodes == {"client-0": 3, "client-1": 4}
    with pytest.raises(UserError, match=r"nodes\.client-0: 'x' is not possible"):
        load_config(settings=["nodes.client-0=x"])


def test_a_deep_setting_is_one_sentence() -> None:
    with pytest.raises(UserError, match="nested too deeply"):
        load_config(settings=["model.hidden=" + 5000 * "["])


def test_the_types_that_a_value_could_have_are_no_part_of_its_place() -> None:
    with pytest.raises(UserError, match=r"^scenario\.inputs: 'age' is not possible; write a list, "):
        load_config(options={"method": "fedavg", "scenario": "own-data"}, settings=['scenario.inputs="age"'])
