"""Leave one environment out: what a run without an environment is, and the score of several."""

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.trainer import Received, Site
from perennial.common.config import RunConfig, load_config, parse_task
from perennial.common.data.examples import ClientData, join
from perennial.common.data.scenarios.colored import RCDigits
from perennial.common.methods.fedavg import FedAvg
from perennial.common.models.network import network
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import load_tensors
from perennial.common.wire import MODEL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.server.selection.split_rule import Select
from perennial.server.study.batch import Outcome, Summary
from perennial.server.study.choose import search
from perennial.server.study.leave_one_out import judge, leave_one_out, not_possible, without_each_environment
from perennial.server.study.run_names import config_digest
from perennial.strategies.base import MethodStrategy
from perennial.testing.tiny_federation import WireGrid


def config_of(method: str = "fedavg", scenario: str = "rc-digits", *settings: str, rounds: int = 1) -> RunConfig:
    """Four environments; in `rc-digits` each client has one, in `rc-digits-2env` two."""
    options = {"method": method, "scenario": scenario, "rounds": rounds}
    few = () if method.startswith("fishr") else ("local_steps=2",)
    return load_config(options=options, settings=[*few, *settings])


def finished(config: RunConfig, path: Path) -> RunFolder:
    LocalRuntime(config).run(RunFolder.create(path, config))
    return RunFolder(path)


def held_out_rows(folder: RunFolder) -> dict[tuple[str, str], tuple[int, int]]:
    """Right answers and samples by client and model."""
    rows = [row for row in folder.rows() if row["kind"] == "evaluation" and row["split"] == "validation"]
    return {(row["client"], row["model"]): (sum(row["correct"]), sum(row["count"])) for row in rows}


# ---------------------------------------------------------------------- a run without an environment


def test_nobody_trains_on_it_and_whoever_has_it_is_asked_how_good_the_model_is(tmp_path: Path) -> None:
    """Against a round of FedAvg by hand, over the other three clients."""
    config = config_of("fedavg", "rc-digits", "left_out='p=0.9'")
    folder = finished(config, tmp_path / "run")
    scenario = config.scenario
    net = network(config.model, scenario.input_shape, scenario.classes)
    data = [scenario.client_data(number, 0, None) for number in range(4)]
    has = [scenario.train_environments[int(own.train.environment[0])] for own in data]
    assert sorted(has) == sorted(scenario.train_environments)
    begin = net.initial(0)
    others = [number for number in range(4) if has[number] != "p=0.9"]
    replies = [
        FedAvgClient(Site(scenario.client_ids[number], data[number], net, 0), FedAvg(local_steps=2), {})
        .train(Received(1, {MODEL: begin}))
        .arrays[MODEL]
        for number in others
    ]
    sizes = [len(data[number].train) for number in others]
    model = load_tensors(folder.path / "models" / "global.safetensors")
    for name, tensor in model.items():
        mean = sum(size * reply[name] for size, reply in zip(sizes, replies, strict=True)) / sum(sizes)
        assert torch.allclose(tensor, mean, atol=1e-6)
    held_out = held_out_rows(folder)
    for number, client in enumerate(scenario.client_ids):
        own = data[number]
        unseen = join([own.train, own.validation])
        right = int((net.predict(model, unseen.x).argmax(dim=1) == unseen.y).sum())
        assert held_out[client, "global"] == ((0, 0) if number in others else (right, len(unseen)))
    summary = folder.summary()
    assert summary["left_out"] == {}  # that is about replies


def test_a_personal_model_is_asked_of_a_client_that_has_another_environment_as_well(tmp_path: Path) -> None:
    config = config_of("ditto", "rc-digits-2env", "left_out='p=0.9'")
    held_out = held_out_rows(finished(config, tmp_path / "two"))
    data = [config.scenario.client_data(number, 0, None) for number in range(4)]
    number = config.scenario.train_environments.index("p=0.9")
    for client, own in zip(config.scenario.client_ids, data, strict=True):
        unseen = int((own.train.environment == number).sum() + (own.validation.environment == number).sum())
        assert {held_out[client, model][1] for model in ("global", "personal")} == {unseen}
    alone = config_of("ditto", "rc-digits", "left_out='p=0.9'")
    found = held_out_rows(finished(alone, tmp_path / "one"))
    assert sum(count for (_, model), (_, count) in found.items() if model == "global") > 0
    assert sum(count for (_, model), (_, count) in found.items() if model == "personal") == 0


@pytest.mark.parametrize(
    "method", ["drfa", "groupdro", "fishr-inter-geo", "fediir", "per-fedavg", "fedrep", "fedsdr", "local"]
)
def test_methods_that_count_their_clients_run_without_one(method: str, tmp_path: Path) -> None:
    summary = finished(config_of(method, "rc-digits", "left_out='p=0.8'"), tmp_path / "run").summary()
    assert summary["left_out"] == {}


def test_the_clients_of_another_process_do_the_same(tmp_path: Path) -> None:
    config = config_of("ditto", "rc-digits-2env", "left_out='p=0.65'")
    local = finished(config, tmp_path / "local")
    folder = RunFolder.create(tmp_path / "wire", config)
    run_rounds(config, folder, WireGrid(config, tmp_path / "sites"), start(config))
    assert held_out_rows(folder) == held_out_rows(local)


def test_samples_of_one_environment_become_the_held_out_ones() -> None:
    data = config_of(scenario="rc-digits-2env").scenario.client_data(0, 0, None)
    first, second = sorted({int(number) for number in data.train.environment})
    found = data.without(first)
    assert set(found.train.environment.tolist()) == {second}
    assert set(found.validation.environment.tolist()) == {first}
    assert len(found.train) + len(found.validation) == len(data.train) + int(
        (data.validation.environment == first).sum()
    )
    assert found.test is data.test


@pytest.mark.parametrize(
    ("scenario", "settings", "word"),
    [
        (
            "rc-digits",
            ["left_out='p=0.91'"],
            "left_out: unknown training environment 'p=0.91'; did you mean 'p=0.9'?",
        ),
        ("own-data", ["left_out=own"], "left_out: 'own' is the only training environment there is"),
        (
            "rc-digits",
            ["left_out='p=0.9'", "privacy.mechanism=fixed"],
            "not possible with privacy.mechanism=fixed",
        ),
    ],
)
def test_what_cannot_be_left_out(scenario: str, settings: list[str], word: str) -> None:
    with pytest.raises(UserError) as error:
        config_of("fedavg", scenario, *settings)
    assert word in str(error.value)


def test_an_ensemble_of_all_clients_is_not_without_one() -> None:
    with pytest.raises(UserError, match="with the method f-fl-games, whose ensemble has a part of every client"):
        config_of("f-fl-games", "rc-digits", "left_out='p=0.9'")


def test_a_site_refuses_a_task_without_an_environment_that_there_is_not() -> None:
    text = (
        config_of("fedavg", "rc-digits", "left_out='p=0.9'").task().replace('"left_out":"p=0.9"', '"left_out":"x"')
    )
    with pytest.raises(
        UserError, match="the server's task cannot be read: left_out: unknown training environment 'x'"
    ):
        parse_task(text)


def test_only_runs_that_leave_something_out_have_another_name() -> None:
    plain = config_of()
    assert len({config_digest(config) for config in [plain, *without_each_environment(plain)]}) == 5
    assert '"left_out": ""' not in str(plain.model_dump(exclude_defaults=True))


# ---------------------------------------------------------------------- the score


def counted(path: Path, environment: str, right: int, total: int, model: str = "global") -> Outcome:
    """A run that has ended, whose clients have these counts after round 4, and others before."""
    config = config_of("fedavg", "rc-digits", f"left_out='{environment}'")
    folder = RunFolder.create(path / environment, config)
    row = {"kind": "evaluation", "round": 4, "model": model, "split": "validation", "environment": ["validation"]}
    folder.append([
        {**row, "client": "client-0", "correct": [right - 1], "count": [total - 3]},
        {**row, "client": "client-1", "correct": [1], "count": [3]},
        {**row, "client": "client-0", "round": 2, "correct": [0], "count": [total]},
        {**row, "client": "client-0", "split": "test", "correct": [0], "count": [total]},
    ])  # fmt: skip
    return Outcome(config, folder.path, Summary(rounds=4, models={"global": {}}))


def test_the_score_is_the_mean_over_environments(tmp_path: Path) -> None:
    counts = {"p=0.95": (90, 100), "p=0.9": (30, 40), "p=0.85": (10, 20)}
    outcomes = [counted(tmp_path, name, *own) for name, own in counts.items()]
    found = judge(outcomes)
    assert found is not None
    assert found.environments == {"p=0.95": 0.9, "p=0.9": 0.75, "p=0.85": 0.5}
    assert found.score == pytest.approx((0.9 + 0.75 + 0.5) / 3, abs=1e-15)
    assert found.error == pytest.approx(sqrt(0.09 / 100 + 0.1875 / 40 + 0.25 / 20) / 3, abs=1e-15)
    assert found.samples == 160
    assert judge([*outcomes, replace(outcomes[0], summary=None, trouble="stopped")]) is None
    assert judge([counted(tmp_path / "other", "p=0.8", 1, 9, model="personal")]) is None


def test_a_damaged_log_judges_nothing_and_is_said(tmp_path: Path) -> None:
    config = config_of("fedavg", "rc-digits")
    leave_one_out([config], tmp_path, 1)
    for path in tmp_path.iterdir():
        (path / "metrics.jsonl").write_text("torn")
    found, why_not = leave_one_out([config], tmp_path, 1)
    assert found == [None]
    assert "metrics.jsonl line 1 is damaged" in why_not


@pytest.mark.slow
def test_every_configuration_is_run_once_without_each_environment_and_not_again(tmp_path: Path) -> None:
    configs = [config_of("fedavg", "rc-digits", f"learning_rate={rate}") for rate in (0.01, 0.1)]
    found, why_not = leave_one_out(configs, tmp_path, 1)
    assert why_not == ""
    assert len(list(tmp_path.glob("fedavg-rc-digits-*/summary.json"))) == 8
    assert all(one and list(one.environments) == ["p=0.95", "p=0.9", "p=0.85", "p=0.8"] for one in found)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    assert leave_one_out(configs, tmp_path, 1) == (found, "")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")} == times


def test_the_score_is_the_same_when_the_test_data_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, _ = leave_one_out([config_of()], tmp_path / "seen", 1)
    whole = RCDigits.client_data

    def hidden(self: Any, client: int, *where: Any) -> ClientData:
        data = whole(self, client, *where)
        return replace(data, test={name: replace(part, y=1 - part.y) for name, part in data.test.items()})

    monkeypatch.setattr(RCDigits, "client_data", hidden)
    assert leave_one_out([config_of()], tmp_path / "hidden", 1)[0] == seen


@pytest.mark.slow
def test_where_it_is_not_possible_a_sentence_says_why(tmp_path: Path) -> None:
    two = config_of(scenario="colored-digits")
    assert not_possible(two) == "leaving out one of 2 training environments leaves too few; three are needed"
    assert leave_one_out([two], tmp_path, 1) == ([None], not_possible(two))
    assert "the method f-fl-games, whose ensemble" in not_possible(config_of("f-fl-games"))
    assert "privacy.mechanism=fixed" in not_possible(config_of("fedavg", "rc-digits", "privacy.mechanism=fixed"))
    assert not_possible(config_of()) == ""
    trials = [config_of("ditto"), config_of("ditto", "rc-digits", "learning_rate=0.02")]
    found, why_not = leave_one_out(trials, tmp_path, 1)
    assert found == [None, None]
    assert why_not == "no client has a personal model and samples of an environment that it has not seen"
    assert len(list(tmp_path.glob("ditto-*"))) == 4, "the first trial's runs say so for all"


@pytest.mark.slow
def test_a_trial_that_could_not_be_judged_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, update = config_of("fedavg", "rc-digits"), MethodStrategy.update

    def raising(self: MethodStrategy[Any], *sent: Any) -> Any:
        if self.run.left_out == "p=0.9" and self.hparams != config.method:
            raise ValueError("the mean of nothing")
        return update(self, *sent)

    monkeypatch.setattr(MethodStrategy, "update", raising)
    outcomes, verdict = search(config, 2, ["local_steps"], Select.leave_one_out, tmp_path, 1)
    assert (verdict.trial, verdict.by) == (0, "leave-one-out")
    assert verdict.sentence.startswith("1 of 2 trials could not be judged: ")
    assert "stopped: ValueError: the mean of nothing (" in verdict.sentence
    assert not any(outcome.trouble for outcome in outcomes)


# ---------------------------------------------------------------------- a site that only tests


def test_a_site_that_only_tests_trains_nothing_and_all_its_samples_are_tested(tmp_path: Path) -> None:
    options = {"method": "ditto", "scenario": {"name": "own-data", "sites": ["a", "b", "c"]}, "rounds": 2}
    for site, shift in (("a", 0), ("b", 1), ("c", 2)):
        rows = "".join(f"{n % 7 + shift},{n % 5},{int(n % 7 > 3)}\n" for n in range(40))
        (tmp_path / f"{site}.csv").write_text(f"x1,x2,label\n{rows}")
    base = load_config(options={**options, "data_root": str(tmp_path)}, settings=["local_steps=2"])
    config = base.model_copy(update={"test_sites": ("c",)})
    folder = finished(config, tmp_path / "run")
    rows = [row for row in folder.rows() if row["kind"] == "evaluation" and row["client"] == "c"]
    assert {row["model"] for row in rows} == {"global"}  # it has no personal one
    assert {(row["split"], sum(row["count"])) for row in rows} == {("validation", 0), ("test", 40)}
    two = load_config(
        options={**options, "scenario": {"name": "own-data", "sites": ["a", "b"]}, "data_root": str(tmp_path)},
        settings=["local_steps=2"],
    )
    without_it = finished(two, tmp_path / "two")
    models = [load_tensors(own.path / "models" / "global.safetensors") for own in (folder, without_it)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert folder.summary()["left_out"] == {}
    assert config_digest(config) != config_digest(base)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["test_sites=['client-9']"], "test_sites: unknown client 'client-9'"),
        (["test_sites=['client-0','client-1','client-2','client-3']"], "somebody must train"),
        (["test_sites=['client-0']", "privacy.mechanism=secagg"], "test_sites: client-0 is not possible with"),
    ],
)
def test_sites_that_cannot_only_test(settings: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        config_of("fedavg", "rc-digits", *settings)
