"""The choice of a trial by `split`, and where held-out data decide in its place."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rich.console import Console
from split_counts import coloured
from typer.testing import CliRunner

from perennial import tune
from perennial.common.config import RunConfig, load_config
from perennial.common.data import scenarios
from perennial.common.data.examples import ClientData
from perennial.common.methods.references import FILE
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.results.figures import knob_figure
from perennial.server.run.folder import RunFolder
from perennial.server.selection.split_rule import WITHOUT_TEST_DATA, Score, Select, most_robust
from perennial.server.study.batch import Outcome, Selected, Summary
from perennial.server.study.choose import (
    advice,
    choose,
    keep,
    no_references,
    references_run,
    search,
    why_lines,
    with_references,
)
from perennial.server.study.compare import Plan, compare, comparison_lines, entries_of
from perennial.server.study.trial_tables import sweep_rows, sweep_table
from perennial.testing.tiny_federation import Toy, toy_config

SIZE = ("scenario.clients=6", "scenario.samples=300", "evaluate_every=2", "batch_size=64", "local_steps=5")


def trial(path: Path, held_out: float, a: float, d: float, **changes: Any) -> Outcome:
    """A run that has ended, with these scores."""
    config = toy_config("fedavg")
    folder = RunFolder.create(path, config)
    folder.append([{**coloured(a, d), "round": 6, **changes}])
    found = Selected(
        round=6,
        accuracy={"a": 0.5},
        worst=0.5,
        average=0.5,
        pooled=0.5,
        validation=held_out,
        clients={"a": {"a": 0.5}},
    )
    return Outcome(config, path, Summary(rounds=6, models={"global": {"final": found}}))


def trials(path: Path, *each: tuple[float, float, float], **changes: Any) -> list[Outcome]:
    return [trial(path / str(number), *one, **changes) for number, one in enumerate(each)]


COLOUR, SHAPE, WEAK, COIN = (0.9, 1.0, 0.0), (0.75, 0.75, 0.72), (0.7, 0.7, 0.7), (0.5, 0.5, 0.5)


def test_split_chooses_what_leaves_the_colour_and_says_why(tmp_path: Path) -> None:
    outcomes = trials(tmp_path, COLOUR, WEAK, SHAPE)
    assert choose(outcomes, Select.held_out).trial == 0
    verdict = choose(outcomes, Select.by_split)
    assert (verdict.trial, verdict.by, verdict.sentence) == (2, "split", "")
    text = "\n".join(why_lines(outcomes, verdict))
    assert "split 72.00 % (standard error 2.75)" in text
    assert "of 300 that they do not; the best constant has 50.00 %" in text
    assert "next best: trial 1 (the defaults), split 70.00 %, no more than two standard errors below" in text


def test_as_in_a_paper_the_trial_with_the_best_round_on_test_data_is_chosen(tmp_path: Path) -> None:
    """The second trial has the round that is right most often, the third that of the lowest loss. One that stopped
    is no choice, whatever its rows say."""
    shares = [[(0.7, 3.0), (0.2, 3.0)], [(0.9, 5.0), (0.1, 5.0)], [(0.3, 4.0), (0.4, 2.0)], [(1.0, 0.0)]]
    outcomes = trials(tmp_path, *[COLOUR] * len(shares))
    for outcome, rounds in zip(outcomes, shares, strict=True):
        for number, (right, loss) in enumerate(rounds, 1):
            counts = {
                "count": [10, 10],
                "correct": [10 - round(10 * right), round(10 * right)],
                "loss": [10 * loss] * 2,
            }
            test = {"client": "a", "model": "global", "split": "test", "environment": ["p=0.9", "p=0.1"]}
            RunFolder(outcome.path).append([{"kind": "evaluation", "round": 2 * number, **test, **counts}])
    outcomes[3] = replace(outcomes[3], summary=None)
    for column, chosen in (("p=0.1", 1), ("p=0.9", 1), ("loss", 2), ("p=0.5", None)):
        verdict = choose(outcomes, Select.as_in_paper, as_in_paper=column)
        assert (verdict.trial, verdict.by, verdict.sentence) == (chosen, "as-in-paper", "")


def test_a_search_that_reads_test_data_is_for_a_paper_s_table_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^as-in-paper is not possible here: nothing says by what test data"):
        compare(Plan(entries_of(["ditto"]), "colored-digits", 1, 2, select=Select.as_in_paper), tmp_path, 1)
    with pytest.raises(UserError, match=r"^select: unknown selection 'as-in-paper'"):
        tune("ditto", scenario="colored-digits", trials=2, select="as-in-paper", out=tmp_path)
    for command in ("tune", "sweep", "compare"):
        asked = CliRunner().invoke(app, [command, "ditto", "--select", "as-in-paper"])
        assert asked.exit_code == 2
        assert "'as-in-paper' is not one of 'held-out', 'split', 'leave-one-out'" in " ".join(
            asked.output.replace("│", " ").split()
        )
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("changes", "why_not", "word"),
    [
        ({}, "there is one training environment, own, and two are needed", "one training environment, own"),
        ({"clients": [4, 0]}, "", "environment p=0.9 alone has held-out samples"),
        ({"samples": coloured(1, 0, p=(0.5, 0.51))["samples"]}, "", "the reference of p=0.9 is right on 50.0 %"),
        ({"samples": coloured(1, 0, p=(1.0, 1.0))["samples"]}, "", "0 held-out samples are wrong"),
        ({"samples": [by[:: 1 - 2 * e] for e, by in enumerate(coloured(1, 0)["samples"])]}, "", "do not tell the"),
        ({"squares": [[4.0, 3.5], [4.0, 3.5]]}, "", "do not tell the env"),
    ],
)
def test_where_split_does_not_speak_held_out_data_decide_with_one_sentence(
    changes: dict[str, Any], why_not: str, word: str, tmp_path: Path
) -> None:
    outcomes = trials(tmp_path, WEAK, COLOUR, SHAPE, **changes)
    if why_not:  # no references, no counts
        for outcome in outcomes:
            (outcome.path / "metrics.jsonl").write_text("")
    verdict = choose(outcomes, Select.by_split, why_not)
    assert (verdict.trial, verdict.by) == (1, "held-out")
    assert verdict.sentence.startswith("split does not speak: ")
    assert word in verdict.sentence
    assert why_lines(outcomes, verdict)[0] == verdict.sentence


def test_where_nothing_beats_a_constant_that_is_said_and_what_loses_least_is_taken(tmp_path: Path) -> None:
    """Held-out data would take the first one, which follows the colour most."""
    outcomes = trials(tmp_path, COLOUR, COIN, (0.8, 0.9, 0.12))
    assert choose(outcomes, Select.held_out).trial == 0
    verdict = choose(outcomes, Select.by_split)
    assert (verdict.trial, verdict.by) == (1, "split")
    # 1700 right and 300 wrong samples of two environments, of 900 and 100 and of 800 and 200.
    error = sqrt(0.9 * 0.1 * (1 / 900 + 1 / 800) / 4 + 0.12 * 0.88 * (1 / 100 + 1 / 200) / 4) / 2
    assert verdict.sentence == (
        "nothing that was tried is better than a constant: the best mean over samples that a reference knows and "
        f"does not know is 51.00 % (standard error {100 * error:.2f}), a constant's 50.00 %; "
        "what loses least was taken"
    )


def test_what_knows_something_is_chosen_before_a_coin_though_it_is_worse_in_the_worst_case(tmp_path: Path) -> None:
    outcomes = trials(tmp_path, COLOUR, COIN, (0.8, 0.9, 0.2), (0.8, 0.9, 0.3))
    verdict = choose(outcomes, Select.by_split)
    assert (verdict.trial, verdict.by, verdict.sentence) == (3, "split", "")
    text = "\n".join(why_lines(outcomes, verdict))
    assert (
        "the best constant has 50.00 % and is no worse: nothing that was tried is better than a constant" in text
    )
    assert "next best: trial 2 " in text


def test_methods_side_by_side_end_in_one_sentence(tmp_path: Path) -> None:
    found = {
        "FedAvg": trials(tmp_path / "fedavg", COLOUR, COLOUR),
        "FedSDR": trials(tmp_path / "fedsdr", SHAPE, WEAK),
        "IRM": trials(tmp_path / "irm", COIN, COIN),
    }
    # Means (0.72 + 0.70) / 2 and 0.5; errors of half of each: 0.0196 and 0.0212.
    assert advice(found) == (
        "first by split: FedSDR with 71.00 % (standard error 1.96), 21.00 points and more than two standard "
        "errors before IRM; the best constant has 50.00 %, and the mean over right and wrong samples is 21.75 "
        "points and more than two standard errors above a constant's"
    )
    assert advice({"IRM": found["IRM"], "FedAvg": found["FedAvg"]}).endswith(
        "; the best constant has 50.00 %, and the mean over right and wrong samples is 0.00 points and no more "
        "than two standard errors above a constant's: nothing that was tried is better than a constant"
    )
    (found["FedSDR"][1].path / "metrics.jsonl").write_text("torn")
    assert "first by split: FedSDR (1 of 2 seeds) with 72.00 %" in advice(found)
    shut_ = {"FedAvg": trials(tmp_path / "shut", SHAPE, clients=[4, 0])}
    assert advice(shut_) == (
        "split does not speak: environment p=0.9 alone has held-out samples, and two are needed"
    )


def test_a_method_that_knows_something_comes_before_a_coin_though_it_is_worse_in_the_worst_case(
    tmp_path: Path,
) -> None:
    coin, learnt = trials(tmp_path / "coin", COIN), trials(tmp_path / "learnt", (0.8, 0.9, 0.3))
    said = advice({"Coin": coin, "Learnt": learnt})
    assert said.startswith(
        "first by split: Learnt with 30.00 % (standard error 2.81); the best constant has 50.00 %"
    )
    assert said.endswith("constant's: nothing that was tried is better than a constant")
    learnt = trials(tmp_path / "more", (0.75, 0.75, 0.51))
    just_above = {"Coin": trials(tmp_path / "just", (0.5, 0.52, 0.52)), "Learnt": learnt}
    assert advice(just_above).startswith("first by split: Learnt with 51.00 %")
    assert "nothing that was tried" not in advice(just_above)


@pytest.mark.slow
def test_a_run_whose_summary_has_an_older_rule_s_score_is_judged_by_its_counts(tmp_path: Path) -> None:
    """The rule is no part of the version in a run's name, so that its counts are judged anew."""
    config = toy_config("fedavg", *SIZE, rounds=2)
    found, _ = search(config, 1, (), Select.by_split, tmp_path, 1)
    path = found[0].path / "summary.json"
    summary = json.loads(path.read_text())
    assert summary["models"]["global"]["final"]["split"]
    summary["models"]["global"]["final"]["split"] = {"score": 0.9}
    path.write_text(json.dumps(summary))
    assert search(config, 1, (), Select.by_split, tmp_path, 1)[0] == found


@pytest.mark.slow
def test_a_comparison_gives_every_seed_its_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    plan = Plan(entries_of(["fedavg"]), "toy", seeds=2, rounds=2, settings=SIZE, select=Select.by_split)
    comparison = compare(plan, tmp_path, 1)
    assert len(list(tmp_path.glob("references-toy-*"))) == 2
    for choice in comparison.choices:
        configs = [RunFolder(Path(run)).config() for run in choice.runs]
        assert len({config.references for config in configs}) == 2
        assert all(Path(config.references).is_file() for config in configs)
    assert comparison.advice in comparison_lines(comparison)
    speaks = not comparison.advice.startswith("split does not speak")
    assert speaks == all(comparison.row(choice.label, "split") is not None for choice in comparison.choices)


def test_nothing_that_can_be_judged_is_said(tmp_path: Path) -> None:
    outcomes = [Outcome(toy_config("fedavg"), tmp_path, None, "stopped")]
    verdict = choose(outcomes, Select.by_split)
    assert verdict.trial is None
    assert why_lines(outcomes, verdict)[-1] == "no trial could be judged, so nothing is chosen"


# ---------------------------------------------------------------------- references beside a study


def test_where_there_can_be_no_references() -> None:
    own = load_config(options={"method": "fedavg", "scenario": "own-data"})
    assert no_references(own) == "there is one training environment, own, and two are needed"
    private = toy_config("fedavg", "privacy.mechanism=fixed")
    sentence = "references are not possible with privacy.mechanism=fixed, since the counts would have no noise"
    assert no_references(private) == sentence
    many = load_config(options={"method": "fedavg", "scenario": "eicu-synthetic"})
    assert no_references(many) == "there are 20 training environments, and references for at most 12"
    assert with_references([own], Path("unused"), 1) == ([own], no_references(own))
    sentences = {task: no_references(toy_config(f"fedavg/{task}")) for task in ("labels", "numbers")}
    assert sentences == {
        "labels": "",
        "numbers": "it counts right and wrong answers, and the task 'numbers' has none",
    }
    left_out = toy_config("fedavg", f"left_out={Toy().train_environments[0]}")
    assert (
        no_references(left_out)
        == f"there is no reference of {left_out.left_out}, which left_out keeps from training"
    )


@pytest.mark.slow
def test_references_are_made_once_for_each_seed_and_model(tmp_path: Path) -> None:
    one = toy_config("fedavg", *SIZE)
    configs = [
        one, toy_config("ditto", *SIZE, "learning_rate=0.1"), one.model_copy(update={"seed": 1}),
        toy_config("fedavg", *SIZE, "model.hidden=[4]"),
    ]  # fmt: skip
    said: list[str] = []
    found, why_not = with_references(configs, tmp_path, 1, lambda now: said.append(now.doing))
    assert why_not == ""
    assert [line.partition(":")[0] for line in said if line] == ["references for split, 3 runs"]
    assert len(list(tmp_path.glob("references-toy-*"))) == 3
    assert found[0].references == found[1].references
    assert len({config.references for config in found}) == 3
    assert references_run(configs[0]) == references_run(configs[1])


def test_no_reference_has_seen_a_site_that_is_only_tested(tmp_path: Path) -> None:
    alone = toy_config("fedavg", *SIZE, "test_sites=['client-0']")
    (found,), why_not = with_references([alone], tmp_path, 1)
    assert why_not == ""
    folder = RunFolder(Path(found.references).parents[1])
    assert folder.config().test_sites == ("client-0",)
    asked = [row["asked"] for row in folder.rows() if row["kind"] == "round"]
    assert asked == [alone.scenario.clients - 1] * 10


class Three(Toy):
    """Three environments, whose shortcuts differ in strength."""

    name: Literal["toy-three"] = "toy-three"  # type: ignore[assignment]
    clients: int = 9
    samples: int = 300

    @property
    def train_environments(self) -> tuple[str, ...]:
        return ("p=0.95", "p=0.85", "p=0.75")

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        environment = client % 3
        parts = [
            self._draw(client, seed, part, 0.95 - environment / 10, environment)
            for part in ("train", "validation")
        ]
        for part in parts:
            part.x[:, 0] *= 0.1  # so that the shortcut is learnt first
        return ClientData(
            *parts, {name: self._draw(client, seed, name, 0.1, -1) for name in self.test_environments}
        )


def three(*settings: str, **options: Any) -> RunConfig:
    few = ("evaluate_every=2", "batch_size=64", "local_steps=5")
    return load_config(
        options={"method": "fedavg", "scenario": {"name": "toy-three"}, "rounds": 2, **options},
        settings=[*few, *settings],
    )


FIXED = ("batch_size", "local_steps")


@pytest.mark.slow
def test_the_choice_is_the_same_when_the_test_data_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test samples of another world: no choice changes, and every rule has scores."""
    verdicts, chosen = {}, {}
    whole = Three.client_data

    def hidden(self: Three, client: int, *where: Any) -> ClientData:
        data = whole(self, client, *where)
        for part in data.test.values():
            part.x.zero_()
            part.y.copy_(1 - part.y)
        return data

    for name in ("seen", "hidden"):
        if name == "hidden":
            monkeypatch.setattr(Three, "client_data", hidden)
        for select in WITHOUT_TEST_DATA:
            outcomes, verdict = search(three(), 2, FIXED, select, tmp_path / name, 1)
            verdicts[name, select] = verdict
            assert all(outcome.summary for outcome in outcomes)
            assert verdict.trial is not None
            chosen[name, select] = outcomes[verdict.trial].selected("final")
    for select in WITHOUT_TEST_DATA:
        assert verdicts["seen", select] == verdicts["hidden", select]
        own = verdicts["seen", select]
        assert select is Select.held_out or len(own.judged or own.rivals) == 2
        assert chosen["seen", select] != chosen["hidden", select]  # it was hidden


def test_a_rival_takes_the_trial_with_most_of_its_measure(tmp_path: Path) -> None:
    part = {"kind": "evaluation", "model": "global", "split": "validation", "round": 6, "environment": ["a"]}
    outcomes = [trial(tmp_path / name, held_out=0.5, a=0.9, d=0.1) for name in ("first", "second", "third")]
    for outcome, accuracies in zip(outcomes, ((9, 3), (5, 5), (8, 4)), strict=True):
        RunFolder(outcome.path).append(
            [
                {**part, "client": str(client), "count": [10], "correct": [correct], "loss": [1.0]}
                for client, correct in enumerate(accuracies)
            ]
        )
    verdict = choose(outcomes, Select.worst_client)
    assert (verdict.trial, verdict.by, verdict.rivals) == (1, "worst-client", {0: 0.3, 1: 0.5, 2: 0.4})
    assert why_lines(outcomes, verdict)[-1] == "worst-client: 0.5000 after the last round"
    assert [row["worst-client"] for row in sweep_rows(outcomes, verdict)] == [0.3, 0.5, 0.4]
    shown = {str(column.header): list(column.cells) for column in sweep_table(outcomes, verdict).columns}
    assert shown["worst-client"] == ["0.3000", "0.5000", "0.4000"]
    silent = choose(outcomes, Select.worst_group, "there is one training environment")
    assert silent.by == "worst-group", "the rows have counts"
    none = choose([replace(outcomes[0], summary=None)], Select.worst_group, "there is one environment")
    assert none.sentence == "worst-group does not speak: there is one environment; held-out data decided"


@pytest.mark.slow
def test_leave_one_out_says_what_it_rests_on(tmp_path: Path) -> None:
    outcomes, verdict = search(three(), 3, FIXED, Select.leave_one_out, tmp_path, 1)
    assert verdict.by is Select.leave_one_out
    assert verdict.trial is not None
    scores = {number: found.score for number, found in verdict.left_out.items()}
    assert scores.keys() == {0, 1, 2}
    assert verdict.trial == max(scores, key=lambda number: (scores[number], -number))
    text = "\n".join(why_lines(outcomes, verdict))
    own = verdict.left_out[verdict.trial]
    assert f"leave-one-out {100 * own.score:.2f} % (standard error {100 * own.error:.2f}) on " in text
    assert all(f"{name} {100 * value:.2f} %" for name, value in own.environments.items())
    assert "next best: trial " in text
    rows = sweep_rows(outcomes, verdict)
    assert [row["leave-one-out"]["score"] for row in rows] == list(scores.values())
    table = Console(width=250, record=True, file=StringIO())
    table.print(sweep_table(outcomes, verdict))
    shown = " ".join(table.export_text().split())
    assert f"{100 * own.score:.2f}" in shown
    assert "by leave-one-out" in shown
    (toml, picture) = keep(outcomes, verdict, Select.leave_one_out, tmp_path)
    assert "leave-one-out accuracy, %" in picture.read_text()
    assert load_config(toml).left_out == ""


def test_leave_one_out_needs_three_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    config = toy_config("fedavg", *SIZE, rounds=1)
    outcomes, verdict = search(config, 2, FIXED, Select.leave_one_out, tmp_path, 1, prune=True)
    assert (verdict.trial, verdict.by) == (choose(outcomes, Select.held_out).trial, "held-out")
    assert verdict.sentence == (
        "leave-one-out does not speak: leaving out one of 2 training environments leaves too few; three are "
        "needed; held-out data decided"
    )
    plan = Plan(entries_of(["fedavg"]), "toy", 1, 2, rounds=1, settings=SIZE, select=Select.leave_one_out)
    comparison = compare(plan, tmp_path, 1)
    assert {choice.sentence for choice in comparison.choices} == {verdict.sentence}
    assert f"FedAvg: {verdict.sentence}" in comparison_lines(comparison)


@pytest.mark.slow
def test_a_comparison_leaves_out_environments_for_every_method_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy-three", Three())
    settings = ("evaluate_every=2", "batch_size=64", "local_steps=5")
    plan = Plan(
        entries_of(["fedavg"]), "toy-three", 1, 2, rounds=2, settings=settings, select=Select.leave_one_out
    )
    comparison = compare(plan, tmp_path, 1)
    fedavg, local = comparison.choices
    assert (fedavg.by, fedavg.sentence) == ("leave-one-out", "")
    assert local.by == "held-out"  # a site's own model, and no site has seen what it is to be judged on
    assert local.sentence.startswith("leave-one-out does not speak: ")


def test_the_files_of_one_search_are_not_another_s(tmp_path: Path) -> None:
    outcomes = trials(tmp_path / "runs", WEAK, SHAPE)
    longer = [replace(own, config=own.config.model_copy(update={"rounds": 7})) for own in outcomes]
    for found in (outcomes, longer):
        for select in (Select.by_split, Select.held_out):
            keep(found, choose(found, select), select, tmp_path)
            keep(found, choose(found, select), select, tmp_path)
    assert len(list(tmp_path.glob("tuned-fedavg-toy-s0-*.toml"))) == 4


@pytest.mark.slow
def test_tune_writes_a_configuration_and_a_picture_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    command = [
        "tune", "--method", "fedavg", "--scenario", "toy", "--trials", "2", "--rounds", "2", "--jobs", "1",
        "--out", str(tmp_path), *(word for setting in SIZE for word in ("--set", setting)),
    ]  # fmt: skip
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert "chosen: trial " in first.output
    (file,) = tmp_path.glob("tuned-*.toml")
    again = load_config(file)
    assert again.method.name == "fedavg"
    assert again.references == ""
    assert tomllib.loads(file.read_text())["scenario"]["clients"] == 6
    (picture,) = tmp_path.glob("tuned-*.svg")
    assert picture.read_text().startswith("<?xml")
    assert "learning_rate" in picture.read_text()
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    assert len(runs) == 3  # two trials, and the references
    second = CliRunner().invoke(app, [*command, "--json"])
    assert second.exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")} == runs
    assert json.loads(second.stdout)["files"] == [str(file), str(picture)]


# ---------------------------------------------------------------------- data for which split has nothing to say


def one_environment(self: Toy, client: int, data: ClientData) -> ClientData:
    """Two training environments by name, of which the clients have one."""
    for part in (data.train, data.validation):
        part.environment.zero_()
    return data


def nobody_wrong(self: Toy, client: int, data: ClientData) -> ClientData:
    """The label can be read off."""
    for part in (data.train, data.validation):
        part.x.copy_((2.0 * part.y - 1)[:, None].expand_as(part.x))
    return data


def at_one_client(self: Toy, client: int, data: ClientData) -> ClientData:
    """Only client 1 is of the second environment."""
    for part in (data.train, data.validation):
        part.environment.fill_(int(client == 1))
    return data


def no_held_out(self: Toy, client: int, data: ClientData) -> ClientData:
    """Of the second environment nobody holds anything out."""
    return replace(data, validation=data.validation[torch.arange(0)]) if client % 2 else data


def at_chance(self: Toy, client: int, data: ClientData) -> ClientData:
    """Labels that nothing tells."""
    for part in (data.train, data.validation):
        part.x.copy_(torch.ones_like(part.x))
        part.y.copy_(torch.arange(len(part.y)) % 2)
    return data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (one_environment, "environment p=0.9 alone has held-out samples, and two are needed"),
        (nobody_wrong, "0 held-out samples are wrong for the reference of p=0.9, and "),
        (at_one_client, "the references do not tell the environments apart (p=0.8 is harder than p=0.9 with t = "),
        (no_held_out, "environment p=0.9 alone has held-out samples, and two are needed"),
        (at_chance, "the reference of p=0.9 is right on 50.0 % of its own environment's held-out samples"),
    ],
)
def test_a_search_on_data_that_split_says_nothing_of_ends_in_held_out_selection(
    change: Callable[[Toy, int, ClientData], ClientData], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Toy.client_data
    monkeypatch.setattr(
        Toy, "client_data", lambda self, client, *where: change(self, client, whole(self, client, *where))
    )
    config = toy_config("fedavg", *SIZE, "learning_rate=0.3", rounds=1)
    outcomes, verdict = search(config, 2, ("learning_rate",), Select.by_split, tmp_path, 1)
    assert verdict.by == "held-out"
    assert verdict.trial == choose(outcomes, Select.held_out).trial
    assert verdict.trial is not None
    first, *rest = why_lines(outcomes, verdict)
    assert first.startswith(f"split does not speak: {why}")
    assert first.endswith("; held-out data decided")
    assert rest[0].startswith(f"chosen: trial {verdict.trial}")


def test_held_out_data_never_decide_where_the_gate_is_open(tmp_path: Path) -> None:
    """All that is tried follows the shortcut or is a constant."""
    outcomes = trials(tmp_path, (0.5, 0.49, 0.49), COLOUR, (0.5, 0.5, 0.5))
    verdict = choose(outcomes, Select.by_split)
    assert (verdict.trial, verdict.by) == (2, "split")
    assert why_lines(outcomes, verdict)[0].startswith("nothing that was tried is better than a constant: ")


@pytest.mark.parametrize(
    ("shares", "order"),
    [
        # A mean of 0.6 and one of 0.595 are not told apart: the worst case decides. 0.55 is below by more.
        ([(0.9, 0.3), (0.7, 0.49), (0.56, 0.54)], [1, 0, 2]),
        # The shortcut and a constant have one mean, and the constant loses least.
        ([(1.0, 0.0), (0.5, 0.5), (0.9, 0.08)], [1, 2, 0]),
        # Equals: the earliest.
        ([(0.6, 0.6), (0.6, 0.6)], [0, 1]),
        # Another fold of the data must not turn the choice to the shortcut: 0.52 is not surely above a constant.
        ([(1.0, 0.01), (0.6, 0.44), (0.99, 0.02)], [1, 2, 0]),
    ],
)
def test_the_most_robust_of_those_that_know_most(shares: list[tuple[float, float]], order: list[int]) -> None:
    scores = {
        number: Score(min(a, d), (a + d) / 2, a, d, 0.028, 1700, 300, 0.5, 0.015, 0.5)
        for number, (a, d) in enumerate(shares)
    }
    assert most_robust(scores) == order


def command(path: Path, *words: str, method: str = "fedavg") -> list[str]:
    """Of a small search."""
    settings = (word for setting in SIZE for word in ("--set", setting))
    return [
        "tune",
        method,
        "--scenario",
        "toy",
        "--rounds",
        "2",
        "--jobs",
        "1",
        "--out",
        str(path),
        *settings,
        *words,
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fedavgg", "--scenario", "toy", "--trials", "2"], "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (["fedavg", "--scenario", "tow", "--trials", "2"], "unknown scenario 'tow'; did you mean 'toy'?"),
        (["fedavg", "--scenario", "toy", "--trials", "0"], "0 is not in the range 2<=x<=10000"),
        (["fedavg", "--scenario", "toy", "--trials", "1"], "1 is not in the range 2<=x<=10000"),
        (["fedavg", "--scenario", "toy", "--trials", "two"], "'two' is not a valid integer"),
        (["fedavg", "--scenario", "toy", "--trials", "2", "--select", "oracle"], "'oracle' is not one of"),
        (["--scenario", "toy", "--trials", "2"], "METHOD: name one method, as in `perennial tune fedsdr"),
        (["fedavg", "--method", "local", "--scenario", "toy", "--trials", "2"], "METHOD: name one method"),
        (["fedavg", "--scenario", "toy", "--trials", "2", "--set", "runtime=deployment"], "studies run in local"),
        (
            ["fedavg", "--scenario", "toy", "--trials", "2", "--set", "references=x"],
            "'x' is not possible with split",
        ),
    ],
)
@pytest.mark.parametrize("study", ["tune", "sweep"])
def test_a_command_that_cannot_be_is_one_sentence(
    study: str, words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    if study == "sweep" and words[-1] == "1":
        pytest.skip("a sweep may have one trial")
    result = CliRunner().invoke(app, [study, *words, "--out", str(tmp_path / "pool")], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert sentence.replace("2<=x", "1<=x" if study == "sweep" else "2<=x") in said
    assert "Traceback" not in said
    assert not (tmp_path / "pool").exists()


@pytest.mark.slow
def test_a_damaged_pool_leaves_the_choice_to_the_other_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    words = command(tmp_path, "--trials", "3")
    whole = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    (chosen,) = (row for row in whole["trials"] if row["chosen"])
    (Path(chosen["run"]) / "summary.json").write_text('{"models": ')
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert f"delete {chosen['run']} to run it again" in result.output
    again = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    (other,) = (row for row in again["trials"] if row["chosen"])
    assert other["trial"] != chosen["trial"]

    (Path(other["run"]) / "metrics.jsonl").write_text('{"kind": "sp')
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert f"{other['run']}/metrics.jsonl line 1 is damaged" in result.output
    third = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["trials"]
    assert "metrics.jsonl line 1 is damaged" in third[other["trial"]]["trouble"]

    (references,) = tmp_path.glob("references-*")
    (references / FILE).unlink()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert f"split does not speak: {references / FILE} is not there; delete {references}" in said


@pytest.mark.slow
def test_an_interrupted_search_says_how_it_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    words = command(tmp_path / "broken", "--trials", "2")
    ran, whole = list[str](), LocalRuntime.run

    def broken_off(self: LocalRuntime, *arguments: Any) -> dict[str, Any]:
        ran.append(self.config.method.name)
        if len(ran) == 3:  # the references, trial 0, and now trial 1
            raise KeyboardInterrupt
        return whole(self, *arguments)

    monkeypatch.setattr(LocalRuntime, "run", broken_off)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 130
    assert "interrupted; the same command continues" in result.output
    assert "Traceback" not in result.output
    assert not list((tmp_path / "broken").glob("tuned-*"))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert ran == ["references", "fedavg", "fedavg", "fedavg"]
    (file,) = (tmp_path / "broken").glob("tuned-*.toml")
    unbroken = CliRunner().invoke(app, command(tmp_path / "unbroken", "--trials", "2"))
    assert unbroken.exit_code == 0
    (other,) = (tmp_path / "unbroken").glob("tuned-*.toml")
    assert file.read_text() == other.read_text()


def test_a_picture_of_a_search_has_its_values_in_plain_numbers() -> None:
    tried = {
        "rate": [0.001, 0.01, 0.1, 0.5, 1.0],
        "size": [32, 64, 32, 64, 128],
        "kind": ["b", "a", "a", "b", "a"],
    }
    scores = [(0.1 * number, 0.02) for number in range(5)]
    picture = knob_figure(tried, scores, "split, %", ["rate", "size"], 4)
    assert "mathdefault" not in picture
    for word in ("0.01", "32", "128", "a", "b", "rate", "size", "kind", "split, %", "chosen"):
        assert f">{word}</text>" in picture
    assert ">50</text>" not in picture  # a choice between a few, with nothing between them
    assert ">chosen</text>" not in knob_figure(tried, scores, "split, %")
