"""Sweeps, comparisons and reproductions: the same numbers for everybody, nothing run twice, nothing hidden."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import model_validator
from typer.testing import CliRunner

from perennial.common.config import RunConfig, load_config
from perennial.common.data import scenarios
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenarios.colored import CMNIST
from perennial.common.methods import METHODS
from perennial.common.methods.ditto import Ditto
from perennial.common.methods.fedavg import FedAvg
from perennial.common.tasks import Classes
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.knobs import between, knob
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.papers import reproduce
from perennial.server.report.load import load
from perennial.server.report.pictures import pictures, training_curve, training_picture
from perennial.server.run.folder import RunFolder
from perennial.server.selection.summary import Evaluation
from perennial.server.study import batch, run_names
from perennial.server.study import compare as comparing
from perennial.server.study import sweep as sweeping
from perennial.server.study.batch import (
    Outcome,
    Selected,
    Standing,
    Summary,
    other_versions,
    outcome_in,
    run_all,
    run_one,
)
from perennial.server.study.compare import Entry, Plan, compare, entries_of, measures
from perennial.server.study.constant import constant_predictor, constant_rows, constant_summary
from perennial.server.study.run_names import code_version, config_digest, imported, name_without_code, run_name
from perennial.server.study.sweep import best, differences, search_ranges, trial, trials
from perennial.strategies.base import MethodStrategy
from perennial.testing.tiny_federation import Toy, toy_config

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def toy_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy scenario by name, as the command line knows scenarios."""
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())


def plan(*methods: str, **facts: Any) -> Plan:
    settings = ("evaluate_every=2", "checkpoint_every=2", "batch_size=20", "local_steps=2")
    facts = {"scenario": "toy", "seeds": 2, "rounds": 4, "settings": settings, **facts}
    return Plan(entries=entries_of(methods), **facts)


def selected(validation: float | None = 0.5, **clients: dict[str, float]) -> Selected:
    return Selected(
        round=1, accuracy={"a": 0.5}, worst=0.5, average=0.5, pooled=0.5, validation=validation, clients=clients
    )


def outcome(validation: float | None, trouble: str = "") -> Outcome:
    found = Summary(rounds=1, models={"global": {"final": selected(validation)}})
    return Outcome(toy_config("fedavg"), Path("x"), None if trouble else found, trouble)


# ---------------------------------------------------------------------- names of run folders

CONFIG = load_config(options={"method": "ditto", "scenario": "colored-digits"})
CHANGES = {
    "seed": st.integers(1, 99),
    "left_out": st.sampled_from(["p=0.9", "p=0.8"]),
    "rounds": st.integers(1, 50),
    "participation": st.floats(0.1, 0.9),
    "evaluate_every": st.integers(1, 9),
    "quorum": st.floats(0.6, 1),
    "cohort_engine": st.sampled_from(["stack", "auto"]),
    "evaluate_clients": st.integers(1, 7),
    "largest": st.floats(1e3, 1e8),
    "most_examples": st.integers(10, 10**6),
    "most_items": st.integers(1, 99),
    "most_array_bytes": st.integers(1, 10**6),
    "most_metric_bytes": st.integers(1, 10**6),
    "most_setting_bytes": st.integers(1, 10**6),
    "test_sites": st.just(["client-0"]),
    "scores": st.sampled_from(["on", "off"]),
    "privacy.mechanism": st.just("adaptive"),
    "clip_norm": st.floats(0.1, 9),
    "clip_value": st.floats(0.1, 9),
    "label_smoothing": st.floats(0.1, 0.9),
    "precision": st.just("bf16"),
    "tf32": st.just(True),
    "augment": st.just(["Noise(0.5)"]),
    "mix": st.sampled_from(["MixUp(1)", "MixUp(0.2)"]),
    "accumulate": st.integers(2, 9),
    "schedule.name": st.sampled_from(["step", "exponential", "cosine"]),
    "schedule.warm_up": st.integers(1, 9),
    "patience": st.integers(1, 9),
    "server_optimizer.name": st.sampled_from(["fedavgm", "fedadam"]),
    "aggregation.rule": st.sampled_from(["median", "trimmed-mean"]),
    "optimizer.name": st.sampled_from(["adam", "adamw"]),
    "optimizer.keep": st.just(True),
    "learning_rate": st.floats(0.1, 1),
    "proximity": st.floats(0.2, 1),
    "local_unit": st.just("epoch"),
    "scenario.clients": st.integers(1, 7),
    "scenario.label_noise": st.floats(0.0, 0.2),
    "model.hidden": st.just([32]),
}
NO_CHANGES = {
    "runtime": st.sampled_from(["simulation", "deployment"]),
    "device": st.just("cpu"),
    "data_root": st.text("abc/", min_size=1),
    "deadline": st.floats(1, 99),
    "wait": st.floats(1, 99),
    "checkpoint_every": st.integers(1, 9),
    "client_cpus": st.floats(0.5, 4),
    "client_gpus": st.floats(0, 1),
    "ray_address": st.text("abc:", min_size=1),
}


def changed(key: str, value: Any) -> RunConfig:
    return load_config(
        options={"method": "ditto", "scenario": "colored-digits"}, settings=[f"{key}={json.dumps(value)}"]
    )


@given(st.sampled_from(sorted(CHANGES)).flatmap(lambda key: st.tuples(st.just(key), CHANGES[key])))
def test_what_changes_numbers_changes_the_digest(change: tuple[str, Any]) -> None:
    config = changed(*change)
    assume(config != CONFIG)
    assert config_digest(config) != config_digest(CONFIG)


@given(st.sampled_from(sorted(NO_CHANGES)).flatmap(lambda key: st.tuples(st.just(key), NO_CHANGES[key])))
def test_what_changes_no_number_does_not(change: tuple[str, Any]) -> None:
    assert run_name(changed(*change)) == run_name(CONFIG)


def test_every_run_setting_is_one_or_the_other() -> None:
    parts = {"method", "scenario", "model"}
    told = {key.partition(".")[0] for key in CHANGES} & set(RunConfig.model_fields)
    told |= {"adapt", "server_schedule"}  # which are nothing without `test_sites`, and `server_optimizer`
    told |= {"metric", "loss"}  # of a plug-in: tests/common/tasks/test_own_metric_and_loss.py
    # A table of clients, which the scenario must have; a file, of which only that there is one is told; modules,
    # whose sources are in the version of the code.
    others = {"nodes", "references", "plugins"}
    assert set(RunConfig.model_fields) - parts == (told - parts) | set(NO_CHANGES) | others
    assert set(NO_CHANGES) | others == run_names.NO_NUMBER


def test_one_hyper_parameter_changes_the_configuration_part_and_nothing_else() -> None:
    before, after = (run_name(config).split("-") for config in (CONFIG, changed("proximity", 0.7)))
    assert [i for i, (one, other) in enumerate(zip(before, after, strict=True)) if one != other] == [4]


def test_a_configuration_from_its_file_has_the_same_name(tmp_path: Path) -> None:
    config = trial(toy_config("ditto"), 3)
    assert run_name(RunFolder.create(tmp_path / "run", config).config()) == run_name(config)


def test_the_code_version_covers_what_a_run_imports_and_no_other_method() -> None:
    ditto = Ditto.__module__, "perennial.client.methods.ditto"
    files = imported("perennial.server.local", CMNIST.__module__, *ditto)
    assert all(path.is_file() for path in files.values())
    found = {name.removeprefix("perennial.") for name in files}
    assert {"server.run.loop", "client.trainer", "strategies.base", "common.data.partition"} <= found
    assert {"common.methods.ditto", "common.data.scenarios.colored"} <= found
    # Imported inside functions, for a quick start.
    assert {"common.data.readers", "common.data.environments", "common.models.network"} <= found
    assert not {"common.methods.local", "tests.toys"} & found
    assert not {"server.cli.main", "server.study.compare", "server.cli.tables", "client.methods.local"} & found


def test_the_code_version_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a": tmp_path / "a.py", "b": tmp_path / "b.py"}
    for path in files.values():
        path.write_text("x = 1\n")
    monkeypatch.setattr(run_names, "imported", lambda *_: dict(files))
    fresh = code_version.__wrapped__
    before = fresh(FedAvg, CMNIST)
    assert fresh(FedAvg, CMNIST) == before
    files["b"].write_text("x = 2\n")
    assert fresh(FedAvg, CMNIST) != before


# ---------------------------------------------------------------------- trials


def test_draws_that_do_not_fit_the_scenario_are_drawn_again() -> None:
    few = load_config(
        options={"method": {"name": "ifca", "clusters": 2}, "scenario": {"name": "toy", "clients": 3}}
    )
    assert search_ranges(METHODS["ifca"])["clusters"].values == (2, 4)
    assert [config.method.model_dump()["clusters"] for config in trials(few, 8)] == [2] * 8
    alone = few.model_copy(update={"scenario": Toy(clients=1)})
    with pytest.raises(UserError, match="trial 1 of ifca: none of 100 draws fits; the last: clusters: "):
        trial(alone, 1)


def test_so_are_draws_against_a_rule_between_hyper_parameters() -> None:
    class Ordered(FedAvg):
        name: Literal["ordered"] = "ordered"  # type: ignore[assignment]
        least: float = knob(0.1, "less than most", le=1, search=between(0.0, 1.0))
        most: float = knob(0.5, "more than least", le=1, search=between(0.0, 1.0))

        @model_validator(mode="after")
        def _ordered(self) -> "Ordered":
            if self.least >= self.most:
                raise ValueError(f"most: {self.most} is not possible; it must be more than least={self.least}")
            return self

    config = toy_config("fedavg").model_copy(update={"method": Ordered()})
    drawn = [found.method.model_dump() for found in trials(config, 8)]
    assert all(own["least"] < own["most"] for own in drawn)
    assert len({own["least"] for own in drawn}) == 8
    never = config.model_copy(update={"method": Ordered(least=0.0, most=0.0000001)})
    with pytest.raises(UserError, match="trial 1 of ordered: none of 100 draws fits; the last: most: "):
        trial(never, 1, {"most"})


def test_a_range_wider_than_its_bounds_is_named() -> None:
    class Wide(FedAvg):
        name: Literal["wide"] = "wide"  # type: ignore[assignment]
        least: float = knob(0.1, "at most 1", le=1, search=between(2.0, 3.0))

    with pytest.raises(UserError, match=r"^trial 1 of wide: least: 2\.\d+ is not possible; "):
        trial(toy_config("fedavg").model_copy(update={"method": Wide()}), 1)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_trials_are_the_same_for_everybody_and_inside_their_ranges(method: str) -> None:
    config = toy_config(method)
    drawn = trials(config, 20)
    assert drawn[0] == config
    assert drawn == trials(config, 20)
    for name, search in search_ranges(type(config.method)).items():
        values = [getattr(one.method, name) for one in drawn[1:]]
        if search.kind == "choice":
            assert set(values) <= set(search.values)
        else:
            assert search.values[0] <= min(values) < max(values) <= search.values[1]
    assert [one.method for one in trials(toy_config(method, seed=1), 20)[1:]] != [one.method for one in drawn[1:]]


def test_a_trial_that_everybody_draws() -> None:
    # Written down, so that a change of the keys is noticed: published choices name trials by number.
    found = trial(load_config(options={"method": "ditto"}), 1).method.model_dump()
    assert found["learning_rate"] == pytest.approx(LEARNING_RATE_OF_TRIAL_1, rel=1e-12)


LEARNING_RATE_OF_TRIAL_1 = 0.0011532653669217678


def test_a_trial_may_draw_its_optimizer_and_a_rate_of_its_range() -> None:
    base = toy_config("ditto", "momentum=0.5", seed=3)
    drawn = trials(base, 30, ["momentum"], ["sgd", "adamw"])
    assert drawn[0] == base
    by_name = {name: [one for one in drawn[1:] if one.optimizer.name == name] for name in ("sgd", "adamw")}
    assert all(len(own) > 5 for own in by_name.values())
    assert {one.method.model_dump()["momentum"] for one in by_name["adamw"]} == {0.0}
    assert {one.method.model_dump()["momentum"] for one in by_name["sgd"]} == {0.5}
    rates = {name: [one.method.model_dump()["learning_rate"] for one in own] for name, own in by_name.items()}
    assert max(rates["adamw"]) <= 1e-2 < max(rates["sgd"])
    plain = trials(base, 30, ["momentum"])
    assert all(one in plain for one in by_name["sgd"])  # whose other draws are what they are without the choice
    assert differences(by_name["adamw"][0], base)["optimizer"] == "adamw"
    for method, name, words in (
        ("fedavg", "adma", "optimizers: name: 'adma' is not possible"),
        ("vrex", "adam", "optimizers: optimizer.name: 'adam' is not possible with method"),
    ):
        with pytest.raises(UserError, match=words):
            trials(toy_config(method), 3, (), ["sgd", name])


def test_a_fixed_hyper_parameter_leaves_the_other_draws_as_they_are() -> None:
    config = toy_config("ditto", "proximity=0.7")
    free, fixed = trial(config, 4).method.model_dump(), trial(config, 4, {"proximity"}).method.model_dump()
    assert fixed.pop("proximity") == 0.7
    assert free.pop("proximity") != 0.7
    assert free == fixed


def test_the_best_trial_is_the_earliest_of_equals_and_troubled_ones_cannot_be() -> None:
    assert best([outcome(0.6), outcome(0.8), outcome(0.8), outcome(0.9, "stopped")]) == 1
    assert best([outcome(None), outcome(0.9, "stopped")]) is None


# ---------------------------------------------------------------------- measures


def test_the_constant_predictor_by_hand() -> None:
    def part(*labels: int) -> Examples:
        y = torch.tensor(labels)
        return Examples(torch.zeros(len(y), 2), y, torch.zeros_like(y))

    majority = ClientData(part(1, 1, 0), part(1, 0), {"a": part(1, 1, 1, 0), "b": part(0, 0)})
    tie = ClientData(part(1, 0), part(0), {"a": part(1, 0), "b": part(0, 0)})
    two = Classes(2)
    found = Evaluation([*constant_rows("x", majority, two), *constant_rows("y", tie, two)], two).summary()
    assert found["clients"] == {"x": {"a": 0.75, "b": 0.0}, "y": {"a": 0.5, "b": 1.0}}
    assert found["accuracy"] == {"a": 0.625, "b": 0.5}
    assert (found["worst"], found["average"], found["validation"]) == (0.5, 0.5625, 0.75)


def test_the_constant_predictor_has_the_data_of_the_run(tmp_path: Path) -> None:
    """A site that does not train says what is most frequent among those that do, of all its rows."""
    data = [Toy().client_data(number, 0, None) for number in range(Toy().clients)]
    labels = torch.cat([own.train.y for own in data[1:]])
    said = labels.bincount().argmax()
    here = data[0].for_testing(Toy().train_environments, Toy().test_environments).test
    alone = toy_config("fedavg", "test_sites=['client-0']")
    found = constant_predictor(alone, 0)
    assert found.clients["client-0"] == {
        name: pytest.approx(float((part.y == said).double().mean())) for name, part in here.items()
    }
    counted = LocalRuntime(alone)
    constant = constant_summary(counted.data(), Classes(2))
    assert (constant["average"], constant["pooled"]) == (found.average, found.pooled)
    whole = constant_predictor(toy_config("fedavg"), 0)
    assert whole.clients["client-1"] == found.clients["client-1"]
    left_out = toy_config("fedavg", f"left_out={Toy().train_environments[0]}")
    assert constant_predictor(left_out, 0).validation != whole.validation
    some = toy_config("fedavg", "evaluate_clients=2", seed=1)
    of_two = constant_predictor(some, 1)
    assert list(of_two.clients) == some.evaluated
    assert of_two.worst == constant_summary(LocalRuntime(some).data(), Classes(2))["worst"]


def test_worst_client_and_bottom_decile() -> None:
    clients = {f"c{n:02d}": {"a": n / 100, "b": n / 50} for n in range(1, 21)}
    found = measures(selected(**clients))
    assert found["worst client"] == pytest.approx(0.015)
    assert found["bottom decile"] == pytest.approx((0.015 + 0.03) / 2)
    few = measures(selected(x={"a": 0.2}, y={"a": 0.4}))
    assert few["bottom decile"] == few["worst client"] == 0.2


def test_an_environment_may_be_called_as_a_measure_is() -> None:
    found = selected().model_copy(update={"values": {"loss": 0.25, "ward": 0.5}, "loss": 2.0})
    rows = comparing._rows("A", "global", "final", [found], (), Classes(2))
    comparison = comparing.Comparison("x", ["loss", "ward"], 1, 1, 1, None, [], rows, [], [])
    means = {line["measure"]: line["mean"] for line in comparison.table}
    assert (means["environment loss"], means["ward"], means["loss"]) == (0.25, 0.5, 2.0)
    _, details = comparing.comparison_tables(comparison)
    assert [list(column.cells) for column in details.columns[2:]] == [["25.00"], ["50.00"]]


# ---------------------------------------------------------------------- comparisons


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[comparing.Comparison, Path]]:
    """Ditto against the baselines, two seeds, three trials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scenarios.SCENARIOS, "toy", Toy())
        out = tmp_path_factory.mktemp("pool")
        yield compare(plan("ditto", trials=3, oracle=True, as_in_paper="p=0.1"), out, jobs=1), out


def test_the_numbers_are_those_of_the_run_folders(finished: tuple[comparing.Comparison, Path]) -> None:
    comparison, _ = finished
    assert comparison.troubles == comparison.older == []
    assert [choice.method for choice in comparison.choices] == ["ditto", "fedavg", "local"]
    for choice in comparison.choices:
        model = METHODS[choice.method].evaluates[-1]
        summaries = [RunFolder(Path(path)).summary()["models"][model] for path in choice.runs]
        assert len(summaries) == 2
        for selection in ("final", "validation"):
            row = comparison.row(choice.label, selection)
            assert row
            for measure, of in {
                "worst": [summary[selection]["worst"] for summary in summaries],
                "p=0.1": [summary[selection]["accuracy"]["p=0.1"] for summary in summaries],
                "held-out": [summary[selection]["validation"] for summary in summaries],
            }.items():
                assert row.columns[measure].mean == pytest.approx(mean(of))
                assert row.columns[measure].deviation == pytest.approx(stdev(of))


def test_oracle_is_a_row_of_its_own_and_never_below(finished: tuple[comparing.Comparison, Path]) -> None:
    comparison, _ = finished
    for label in ("Ditto", "FedAvg", "Local"):
        rows = {s: comparison.row(label, s) for s in ("oracle", "final", "validation")}
        averages = {s: row.measures["average"].mean for s, row in rows.items() if row}
        assert averages["oracle"] == max(averages.values())


def test_the_round_that_is_best_where_the_paper_chose_is_a_row_of_its_own(
    finished: tuple[comparing.Comparison, Path],
) -> None:
    comparison, _ = finished
    for label in ("Ditto", "FedAvg", "Local"):
        rows = {s: comparison.row(label, s) for s in ("as-in-paper", "final", "validation", "oracle")}
        there = {s: row.columns["p=0.1"].mean for s, row in rows.items() if row}
        assert len(there) == 4
        assert there["as-in-paper"] == max(there.values())


def test_the_same_budget_and_seed_0_is_not_run_twice(finished: tuple[comparing.Comparison, Path]) -> None:
    comparison, out = finished
    for choice in comparison.choices:
        folders = [RunFolder(path).config() for path in out.iterdir() if path.name.startswith(choice.method)]
        assert sorted(config.seed for config in folders) == [0, 0, 0, 1]
        assert all(config.method.batch_size == 20 for config in folders)  # type: ignore[attr-defined]
    assert not list(out.glob("*/checkpoint"))


def test_the_constant_predictor_is_in(finished: tuple[comparing.Comparison, Path]) -> None:
    row = finished[0].row("Constant", "final")
    each = [constant_predictor(toy_config("fedavg"), seed).average for seed in range(2)]
    assert row
    assert row.measures["average"].mean == pytest.approx(mean(each))


def test_again_runs_nothing_and_says_the_same(finished: tuple[comparing.Comparison, Path]) -> None:
    comparison, out = finished
    times = {path: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}
    standings: list[Standing] = []
    assert (
        compare(plan("ditto", trials=3, oracle=True, as_in_paper="p=0.1"), out, 2, standings.append) == comparison
    )
    assert all(standing.rounds == 0 for standing in standings)
    assert times == {path: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}


def test_figures_of_a_comparison(finished: tuple[comparing.Comparison, Path]) -> None:
    comparison, _ = finished
    made = pictures(comparison)
    assert set(made) == {"environments", "rounds"}
    for svg in made.values():
        assert all(f">{choice.label}</text>" in svg for choice in comparison.choices)
    label = comparison.choices[0].label
    fewer = pictures(comparison, [label])["rounds"]
    assert f">{label}</text>" in fewer
    assert f">{comparison.choices[1].label}</text>" not in fewer
    assert pictures(comparison) == made
    assert pictures(comparison, ["another"]) == {}
    gone = [replace(choice, runs=["gone", *choice.runs[1:]]) for choice in comparison.choices]
    assert set(pictures(replace(comparison, choices=gone))) == {"environments", "rounds"}
    assert pictures(replace(comparison, choices=[replace(gone[0], runs=["gone"])])) == {}


@pytest.mark.slow
def test_a_training_curve_ends_with_the_game(tmp_path: Path) -> None:
    settings = ["order=sequential", "warm_start=2", "termination=1", "batch_size=20"]
    config = load_config(options={"method": "f-fl-games", "scenario": "toy", "rounds": 5}, settings=settings)
    (outcome,) = run_all([config], tmp_path, 1)
    assert [row["round"] for row in RunFolder(outcome.path).rows() if row["kind"] == "equilibrium"] == [2]
    run = load(outcome.path)
    assert ">game</text>" in training_picture({"game": run})
    assert training_curve(run).keys() == {1, 2}


def test_settings_reach_the_methods_that_have_them() -> None:
    entries = entries_of(["ditto", "fedavg"])
    both = Plan(entries, "toy", seeds=1, settings=("proximity=3", "momentum=0.5"))
    ditto, fedavg = (comparing.base_config(both, entry, entries).method.model_dump() for entry in entries)
    assert (ditto["proximity"], ditto["momentum"], fedavg["momentum"]) == (3, 0.5, 0.5)
    weaker = Entry("weaker pull", "ditto", {"proximity": 0.5})
    own = comparing.base_config(replace(both, entries=(weaker,)), weaker, (weaker,)).method.model_dump()
    assert (own["proximity"], own["momentum"]) == (0.5, 0.5)  # what a row says of itself holds against all rows'
    with pytest.raises(UserError, match="unknown setting 'proximty'; did you mean 'proximity'"):
        compare(replace(both, settings=("proximty=3",)), Path("unused"), 1)
    with pytest.raises(UserError, match="--set seed=7 is not possible here; say how many with --seeds"):
        compare(replace(both, settings=("seed=7",)), Path("unused"), 1)
    with pytest.raises(UserError, match="runtime: 'deployment' is not possible here"):
        compare(replace(both, settings=("runtime=deployment",)), Path("unused"), 1)


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.slow
def test_damaged_and_older_folders_are_named_and_skipped(tmp_path: Path) -> None:
    configs = [toy_config("fedavg", rounds=2, seed=seed) for seed in range(5)]
    good, torn, empty, edited, stale = run_all(configs, tmp_path, jobs=1)
    (torn.path / "summary.json").write_text('{"models": {"glo')
    (empty.path / "summary.json").write_text('{"rounds": 2, "models": {"global": {"final": {}}}}')
    (edited.path / "config.toml").write_text((stale.path / "config.toml").read_text())
    aside = stale.path.rename(tmp_path / f"{name_without_code(stale.config)}-0badc0de")
    found = run_all(configs, tmp_path, jobs=1)
    assert found[0] == good
    assert [bool(outcome.trouble) for outcome in found] == [False, True, True, True, False]
    for outcome, reason in zip(
        found[1:4], ["damaged", "damaged", "is not the configuration that the folder is named after"], strict=True
    ):
        assert str(outcome.path) in outcome.trouble
        assert reason in outcome.trouble
        assert outcome.trouble.endswith(f"delete {outcome.path} to run it again")
    assert found[4].path.exists()
    assert other_versions(configs, tmp_path) == [aside]


@pytest.mark.parametrize("file", ["config.toml", "summary.json", "metrics.jsonl"])
def test_a_damaged_run_leaves_the_means_to_the_others(file: str, tmp_path: Path) -> None:
    before = compare(plan("fedavg"), tmp_path, 1)
    path = Path(before.choices[0].runs[1])
    (path / file).write_bytes((path / file).read_bytes()[:-3] + b"= [")
    after = compare(plan("fedavg"), tmp_path, 1)
    row = after.row("FedAvg", "final")
    assert row
    assert (row.seeds, row.measures["worst"].deviation) == (1, None)
    assert len(after.troubles) == 1
    assert str(path / file) in after.troubles[0]
    assert after.row("Local", "final") == before.row("Local", "final")


def test_a_log_of_another_kind_costs_what_is_read_from_it_alone(tmp_path: Path) -> None:
    before = compare(plan("fedavg", oracle=True), tmp_path, 1)
    path = Path(before.choices[0].runs[1])
    (path / "metrics.jsonl").write_text('{"kind": "evaluation"}\n')
    after = compare(plan("fedavg", oracle=True), tmp_path, 1)
    oracle = after.row("FedAvg", "oracle")
    assert oracle
    assert oracle.seeds == 1
    assert after.row("FedAvg", "final") == before.row("FedAvg", "final")
    (trouble,) = after.troubles
    assert trouble.startswith(f"the files of {path} are damaged or of another version (KeyError")


@pytest.mark.slow
def test_where_no_trial_can_be_judged_that_is_said(tmp_path: Path) -> None:
    words = ["compare", "--methods", "fedavg", "--scenario", "colored-digits", "--seeds", "1", "--trials", "2"]
    more = ["--rounds", "1", "--set", "scenario.validation_fraction=0", "--select", "held-out", "--jobs", "1"]
    more += ["--out", str(tmp_path / "pool"), "--report", str(tmp_path / "page.html")]
    result = CliRunner().invoke(app, [*words, *more], env={"COLUMNS": "300"})
    said = " ".join(result.output.split())
    assert (
        "FedAvg: none of 2 trials can be judged, so it has no rows: they stopped, or nothing is held out" in said
    )
    assert "perennial: there is no run to report" in said
    assert result.exit_code == 2


def test_a_run_that_stops_is_noted_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diverging = toy_config("fedavg", "learning_rate=10", "weight_decay=1", "momentum=0.99", rounds=200)
    (found,) = run_all([diverging], tmp_path, jobs=1)
    assert "stopped: " in found.trouble
    file = found.path / "error.txt"
    why = file.read_bytes()
    file.write_bytes(b"caf\xe9")
    assert "stopped: caf�;" in run_all([diverging], tmp_path, jobs=1)[0].trouble
    file.write_bytes(why)
    monkeypatch.setattr(batch, "run_one", lambda *_: pytest.fail("run again"))
    assert run_all([diverging], tmp_path, jobs=1) == [found]


def test_so_is_one_in_which_our_own_code_raises_and_its_traceback_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(self: MethodStrategy[Any], *_: Any) -> Any:
        if self.run.seed == 1:
            raise KeyError("model")
        if self.run.seed == 2:
            raise RunStopped("its clients had not enough memory")

    monkeypatch.setattr(MethodStrategy, "update", update)
    good, found, stopped = run_all([toy_config("fedavg", seed=seed) for seed in range(3)], tmp_path, jobs=1)
    assert good.summary
    assert " stopped: its clients had not enough memory; delete it" in stopped.trouble
    assert f" stopped: KeyError: 'model' ({__file__}, line " in found.trouble
    assert "KeyError: 'model'" in (found.path / "traceback.txt").read_text()
    assert outcome_in(found.config, found.path) == found


def after_ctrl_c() -> Exception:
    """As a library that catches everything."""
    try:
        try:
            raise KeyboardInterrupt
        except BaseException:
            raise RuntimeError("cannot be imported")  # noqa: B904
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), after_ctrl_c()])
def test_what_is_no_fault_of_a_run_ends_the_study(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(self: MethodStrategy[Any], *_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(MethodStrategy, "update", update)
        with pytest.raises(type(error)):
            run_all([toy_config("fedavg")], tmp_path, jobs=1)

    def watch(standing: Standing) -> None:
        if standing.rounds_done == 2:
            raise ValueError("of whoever watches")

    with pytest.raises(ValueError, match="of whoever watches"):
        run_all([toy_config("fedavg")], tmp_path, 1, watch)
    (found,) = run_all([toy_config("fedavg")], tmp_path, jobs=1)
    assert found.summary


def test_a_run_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    config = toy_config("fedavg", "checkpoint_every=4", rounds=4)
    path = tmp_path / run_name(config)
    RunFolder.create(path, config).append([{"kind": "torso"}])
    assert outcome_in(config, path) is None
    assert run_one(config, path, lambda _: None).summary
    assert "torso" not in RunFolder(path).log.read_text()


def test_a_run_of_a_pool_is_held_while_it_is_trained_and_a_second_study_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config("fedavg", rounds=2)
    path = tmp_path / run_name(config)
    trained, second = list[str](), ThreadPoolExecutor(1)
    waiting = list[Future[Outcome]]()

    def train(self: LocalRuntime, *arguments: Any) -> dict[str, Any]:
        trained.append(RunFolder(path).owner())
        waiting.append(second.submit(run_one, config, path, lambda _: None))
        return whole(self, *arguments)

    whole = LocalRuntime.run
    monkeypatch.setattr(LocalRuntime, "run", train)
    first = run_one(config, path, lambda _: None)
    assert waiting[0].result(timeout=60) == first
    assert len(trained) == 1
    assert trained[0].startswith(f"process {os.getpid()} on ")  # also `perennial resume` keeps away


def test_a_missing_data_set_is_a_sentence_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERENNIAL_DATA", raising=False)
    arguments = ["compare", "--methods", "ditto", "--scenario", "cmnist", "--out", str(tmp_path / "pool")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert not (tmp_path / "pool").exists()


COMMAND = f"""
import sys; sys.path.insert(0, {str(TESTS / "helpers")!r})
from perennial.common.data import scenarios
from tiny_runs import Toy
scenarios.SCENARIOS["toy"] = Toy()
from perennial.server.cli.main import main
main()
"""


@pytest.mark.slow
def test_killed_and_started_again_repeats_nothing(tmp_path: Path) -> None:
    arguments = ["compare", "--methods", "ditto", "--scenario", "toy", "--seeds", "2", "--rounds", "80"]
    arguments += ["--select", "held-out", "--set", "checkpoint_every=4", "--set", "evaluate_every=40", "--out"]
    command = [sys.executable, "-c", COMMAND, *arguments]
    out = tmp_path / "pool"
    process = subprocess.Popen([*command, str(out), "--jobs", "2"], start_new_session=True)

    def finished() -> dict[Path, int]:
        return {path.parent: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}

    def unfinished() -> list[int]:
        rounds = {path: int(path.name.removeprefix("round-")) for path in out.glob("*/checkpoint/round-*[0-9]")}
        return [number for path, number in rounds.items() if path.parents[1] not in finished()]

    # One that is nearly done may end before its worker notices.
    while not (finished() and any(number < 40 for number in unfinished())):
        assert process.poll() is None, "the comparison ended before it could be killed; make it longer"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)  # the parent alone: its workers must notice
    process.wait()
    deadline = time.monotonic() + 30
    while _members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _members(process.pid)

    done, begun = finished(), unfinished()
    settings = ("checkpoint_every=80", "evaluate_every=40")  # the first changes no number
    again = Plan(entries_of(["ditto"]), "toy", 2, rounds=80, settings=settings)
    continued = compare(again, out, 1)
    assert len(finished()) == 6
    assert done == {path: written for path, written in finished().items() if path in done}
    assert begun
    assert continued.rows == compare(again, tmp_path / "unbroken", 1).rows


def _members(group: int) -> list[int]:
    """Living processes of a session, zombies apart."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if os.getsid(int(entry.name)) == group and fields[0] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


# ---------------------------------------------------------------------- the papers' tables


@pytest.mark.parametrize("name", sorted(reproduce.reproductions()))
def test_every_file_fits(name: str) -> None:
    table = reproduce.load_reproduction(name)
    for quick in (False, True):
        planned = table.plan(quick)
        entries = comparing.with_baselines(planned.entries)
        for entry in entries:
            config = comparing.base_config(planned, entry, entries)
            assert config.rounds == planned.rounds
            assert all(getattr(config.method, key) == value for key, value in entry.settings.items())


@pytest.mark.parametrize("name", sorted(reproduce.reproductions()))
def test_every_row_of_a_table_can_be_made_alone(name: str) -> None:
    """Though the table's settings may be of methods that the row and the baselines are not."""
    table = reproduce.load_reproduction(name)
    whole = comparing.with_baselines(table.plan(quick=False).entries)
    for row in filter(lambda row: row.implemented, table.rows):
        plan = table.plan(quick=False, only=[row.title])
        entries = comparing.with_baselines(plan.entries)
        (entry,) = (entry for entry in entries if entry.label == row.title)
        alone, together = (comparing.base_config(plan, entry, own) for own in (entries, whole))
        assert alone == together == comparing.base_config(table.plan(quick=False), entry, whole)


GOOD = """
title = "T"
source = "S"
scenario = "toy"
rounds = 4
seeds = 2
trials = 1
columns = ["worst", "p=0.1"]
remarks = ["other pictures"]

[settings]
local_steps = 2

[quick]
rounds = 2

[[rows]]
title = "FedAvg"
method = "fedavg"
paper = { worst = 50.0, "p=0.1" = 60.0 }

[[rows]]
title = "Tomorrow"
method = "tomorrow"
paper = { worst = 99.0, "p=0.1" = 99.5 }
comparable = false
remark = "another world"
"""


@pytest.mark.parametrize(
    ("good", "bad", "sentence"),
    [
        ("rounds = 4", "rounds = 0", r"rounds: 0 is not possible; input should be greater than or equal to 1"),
        ("seeds = 2", "sedes = 2", r"seeds: a value is missing \(and 1 more\)|sedes: there is no such setting"),
        ('scenario = "toy"', 'scenario = "toi"', r"unknown scenario 'toi'; did you mean 'toy'\?"),
        ('"p=0.1"]', '"p=0.3"]', r"unknown column 'p=0.3'"),
        ("worst = 50.0, ", "", r"row 'FedAvg' must have a number for each of worst, p=0.1"),
        ("[settings]", 'drawn = ["FedAgv"]\n[settings]', r"unknown drawn row 'FedAgv'; did you mean 'FedAvg'\?"),
        ('"Tomorrow"', '"FedAvg"', r"two rows have the title 'FedAvg'"),
        ('remark = "another world"', "", r"row 'Tomorrow' needs a remark"),
        ("[quick]", "[quick", r"is not valid TOML"),
    ],
)
def test_a_file_that_does_not_fit_is_one_sentence(good: str, bad: str, sentence: str, tmp_path: Path) -> None:
    assert good in GOOD
    (tmp_path / "t.toml").write_text(GOOD.replace(good, bad, 1))
    with pytest.raises(UserError, match=sentence) as caught:
        reproduce.load_reproduction("t", tmp_path)
    assert str(tmp_path / "t.toml") in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="unknown reproduction 'u'"):
        reproduce.load_reproduction("u", tmp_path)


def test_a_row_of_a_figure_has_no_numbers(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(GOOD.replace('paper = { worst = 50.0, "p=0.1" = 60.0 }', ""))
    assert reproduce.load_reproduction("t", tmp_path).rows[0].paper == {}


def test_the_quick_version_may_have_settings_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(
        GOOD.replace("[quick]", '[quick]\nsettings = { "model.hidden" = [4], seed = 0 }')
    )
    table = reproduce.load_reproduction("t", tmp_path)
    assert table.plan(quick=False).settings == ("local_steps=2",)
    assert table.plan(quick=True).settings == ("local_steps=2", "model.hidden=[4]", "seed=0")
    as_long = compare(table.plan(quick=True, rounds=table.rounds, seeds=table.seeds), tmp_path / "pool", 1)
    assert "QUICK VERSION" in str(reproduce.reproduction_table(table, as_long, quick=True).title)
    assert reproduce.reproduction_json(table, as_long, quick=True)["quick"]


def test_remarks_are_those_of_the_rows_shown(tmp_path: Path) -> None:
    row = '[[rows]]\ntitle = "Ditto"\nmethod = "ditto"\nremark = "not asked for"\n\n'
    (tmp_path / "t.toml").write_text(GOOD.replace("[[rows]]", row + "[[rows]]", 1))
    table = reproduce.load_reproduction("t", tmp_path)
    comparison = compare(table.plan(quick=True, only=("FedAvg",)), tmp_path / "pool", 1)
    assert reproduce.remark_lines(table, comparison) == ["- other pictures", "[2] another world"]


@pytest.mark.parametrize("quick", [False, True])
def test_paper_and_ours_side_by_side(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.toml").write_text(GOOD)
    table = reproduce.load_reproduction("t", tmp_path)
    comparison = compare(table.plan(quick), tmp_path / "pool", 1)
    lines = {(line.title, line.column): line for line in reproduce.side_by_side(table, comparison)}
    assert [title for title, column in lines if column == "worst"] == ["FedAvg", "Tomorrow", "Local", "Constant"]
    ours = comparison.row("FedAvg", "final")
    assert ours
    line = lines["FedAvg", "p=0.1"]
    assert line.difference("final") == pytest.approx(100 * ours.environments["p=0.1"].mean - 60.0)
    assert lines["Tomorrow", "worst"].ours == {"final": None, "validation": None}
    assert lines["Local", "worst"].difference("final") is None
    assert reproduce.remark_lines(table, comparison) == ["- other pictures", "[1] another world"]

    monkeypatch.setattr("perennial.server.papers.reproduce.load_reproduction", lambda name: table)
    arguments = ["reproduce", "t", "--jobs", "1", "--out", str(tmp_path / "pool")]
    result = CliRunner().invoke(app, arguments + ["--quick"] * quick)
    assert result.exit_code == 0, result.output
    assert ("QUICK VERSION, not comparable with the paper" in result.stdout) == quick
    assert "not implemented yet" in result.stdout
    # local_steps is the table's
    assert "hyper-parameters: what was set, else the defaults; no search" in result.stdout
    difference = f"{line.difference('final'):+.2f}"
    assert (f"({difference})" if quick else f" {difference} ") in result.stdout


def test_fewer_seeds_are_said_and_stay_comparable_and_fewer_rounds_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.toml").write_text(GOOD)
    table = reproduce.load_reproduction("t", tmp_path)
    monkeypatch.setattr("perennial.server.papers.reproduce.load_reproduction", lambda name: table)
    arguments = ["reproduce", "t", "--jobs", "1", "--out", str(tmp_path / "pool")]
    seeds = CliRunner().invoke(app, [*arguments, "--seeds", "1"]).stdout
    assert "4 rounds, 1 seed, 1 trial (whole: 4 rounds, 2 seeds, 1 trial)" in " ".join(seeds.split())
    assert "QUICK" not in seeds
    assert "QUICK" in CliRunner().invoke(app, [*arguments, "--seeds", "1", "--rounds", "2"]).stdout


# ---------------------------------------------------------------------- the command line


@pytest.mark.slow
def test_sweep_prints_its_trials(tmp_path: Path) -> None:
    arguments = [
        "sweep",
        "--method",
        "ditto",
        "--scenario",
        "toy",
        "--trials",
        "3",
        "--rounds",
        "2",
        "--jobs",
        "1",
    ]
    arguments += ["--set", "local_steps=2", "--out", str(tmp_path / "pool")]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["trial"] for row in rows] == [0, 1, 2]
    assert [row["chosen"] for row in rows].count(True) == 1
    assert {row["settings"]["local_steps"] for row in rows} == {2}
    arguments += ["--select", "held-out"]
    held_out = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert max(row["held-out"] for row in held_out) == next(r["held-out"] for r in held_out if r["chosen"])
    assert "*" in CliRunner().invoke(app, arguments).stdout
    names = [path.name.split("-")[0] for path in (tmp_path / "pool").iterdir()]
    assert sorted(names) == ["ditto"] * 6 + ["references"]  # three trials with references, three without


def test_compare_prints_both_tables(tmp_path: Path) -> None:
    arguments = [
        "compare",
        "--methods",
        "fedavg",
        "--scenario",
        "toy",
        "--seeds",
        "1",
        "--rounds",
        "2",
        "--jobs",
        "1",
    ]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for text in ("FedAvg (global)", "Local (personal)", "Constant", "final", "validation", "p=0.9"):
        assert text in result.stdout
    assert "oracle" not in result.stdout
    page = tmp_path / "page.html"
    searched = [*arguments, "--out", str(tmp_path), "--trials", "2", "--report", str(page)]
    assert CliRunner().invoke(app, searched).exit_code == 0
    assert len([*tmp_path.glob("fedavg-*"), *tmp_path.glob("local-*")]) > 2
    assert "2 runs, 1 scenario" in page.read_text()  # of a method one, and no trial that was not chosen
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), "--oracle"])
    assert "oracle: the round that is best on test data" in " ".join(result.stdout.split())


def test_an_entry_keeps_its_own_settings() -> None:
    entries = (Entry("A", "ditto", {"proximity": 2.0}), Entry("B", "ditto", {"proximity": 3.0}))
    both = Plan(entries, "toy", seeds=1, trials=2)
    for entry, proximity in zip(entries, (2.0, 3.0), strict=True):
        base = comparing.base_config(both, entry, entries)
        drawn = comparing.trials_of(both, entry, base)[1].method.model_dump()
        assert drawn["proximity"] == proximity
        assert drawn["learning_rate"] != base.method.model_dump()["learning_rate"]


def test_a_row_may_have_a_model_of_its_own(tmp_path: Path) -> None:
    row = 'title = "FedAvg"\nmethod = "fedavg"\n'
    own = GOOD.replace(row, row + "model = { hidden = [5, 4], head_layers = 1 }\n")
    (tmp_path / "t.toml").write_text(own.replace('"p=0.1"', '"held-out"'))
    planned = reproduce.load_reproduction("t", tmp_path).plan(quick=True)
    first, *others = entries = comparing.with_baselines(planned.entries)
    model = comparing.base_config(planned, first, entries).model.model_dump()
    assert (model["name"], model["hidden"], model["head_layers"]) == ("mlp", (5, 4), 1)
    for entry in others:
        assert comparing.base_config(planned, entry, entries).model.model_dump()["hidden"] == (8,)


# ---------------------------------------------------------------------- what a person is told of many runs


def told(standings: list[Standing]) -> list[str]:
    return [line for line in map(batch.standing_line, standings) if line]


@pytest.mark.slow
@pytest.mark.parametrize("trials", [1, 3])
def test_a_comparison_has_one_count_over_trials_and_final_runs(trials: int, tmp_path: Path) -> None:
    standings: list[Standing] = []
    compare(plan("fedavg", trials=trials), tmp_path, 1, standings.append)
    loading, first, *lines = told(standings)
    every = 2 * (trials + 1)  # FedAvg and Local, with two seeds
    assert "loading" in loading
    assert first == (
        f"{every} runs: 0 done already, 0 go on where they were interrupted; {4 * every} rounds to come. "
        "If interrupted, the same command goes on."
    )
    assert [line.partition(" ")[0] for line in lines] == [f"{number}/{every}" for number in range(1, every + 1)]
    assert all(" to go" in line for line in lines[:-1])
    assert " to go" not in lines[-1]
    assert [s.rounds_done for s in standings] == sorted(s.rounds_done for s in standings)
    assert {s.runs for s in standings[1:]} == {every}
    assert {s.rounds for s in standings[1:]} == {4 * every}


def test_the_start_says_what_is_there_and_what_goes_on(tmp_path: Path) -> None:
    configs = [toy_config("fedavg", seed=seed, rounds=4) for seed in range(3)]
    run_all(configs[:1], tmp_path, 1)

    def stop(standing: Standing) -> None:
        if standing.rounds_done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(configs, tmp_path, 1, stop)
    standings: list[Standing] = []
    run_all(configs, tmp_path, 1, standings.append)
    assert told(standings)[0].startswith("3 runs: 1 done already, 1 go on where they were interrupted; 6 ")


def test_the_start_counts_a_damaged_run_apart(tmp_path: Path) -> None:
    configs = [toy_config("fedavg", seed=seed) for seed in range(2)]
    first, _ = run_all(configs, tmp_path, 1)
    (first.path / "summary.json").write_text("{}")
    standings: list[Standing] = []
    run_all(configs, tmp_path, 1, standings.append)
    assert told(standings)[0].startswith("2 runs: 1 done already, 1 stopped or damaged, 0 go on where")


def test_a_study_of_which_all_is_done_says_so_once(tmp_path: Path) -> None:
    for _ in range(2):
        standings: list[Standing] = []
        compare(plan("fedavg", trials=2, seeds=1), tmp_path, 1, standings.append)
    assert [line.partition(",")[0] for line in told(standings)] == [
        "2 methods on toy",
        "4 runs: 4 done already",
    ]


def test_an_estimate_from_the_rounds_so_far() -> None:
    ended = outcome(0.5)
    assert "  about 40 min to go" in batch.standing_line(Standing(1, 5, 10, 50, ended, seconds=600))
    assert "  about 12 s to go" in batch.standing_line(Standing(1, 5, 10, 50, ended, seconds=3))
    assert " to go" not in batch.standing_line(
        Standing(1, 5, 0, 50, ended, seconds=3)
    )  # no round of it was run here
    assert "  about 5.0 h to go" in batch.standing_line(Standing(1, 5, 10, 110, ended, seconds=1800))


@pytest.mark.slow
def test_trials_that_tie_are_said_to(tmp_path: Path) -> None:
    comparison = compare(plan("fedavg", trials=3, rounds=1, settings=("learning_rate=1e-9",)), tmp_path, 1)
    assert [choice.tied for choice in comparison.choices] == [3, 3]
    assert comparing.comparison_lines(comparison) == [
        f"{label}: trial 0 of 3 (the defaults); 3 trials tie; the defaults were kept"
        for label in ("FedAvg", "Local")
    ]
    found = CliRunner().invoke(
        app,
        [
            *("sweep", "--method", "fedavg", "--scenario", "toy", "--trials", "2", "--rounds", "1", "--jobs", "1"),
            *("--set", "learning_rate=1e-9", "--out", str(tmp_path)),
        ],
        env={"COLUMNS": "250"},
    )
    assert "2 trials tie; the defaults were kept" in " ".join(found.stdout.split())
    assert sweeping.equals([outcome(0.4), outcome(0.6), outcome(None), outcome(0.6)]) == [1, 3]
    assert sweeping.tie(2, 1) == "2 trials tie; the first of them was taken"
    assert sweeping.tie(1, 0) == ""
