"""What a site allows, whose versions it takes, and what it writes down."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.supercore.run import Run
from typer.testing import CliRunner

import perennial
from perennial.client.node import installed
from perennial.client.node.policy import Policy, read_policy
from perennial.common.config import RunConfig, load_config, parse_task
from perennial.common.flower.arrays import carried
from perennial.common.measures.ranking import BATCH
from perennial.common.measures.scores import SCORES
from perennial.common.privacy.mechanisms import epsilon
from perennial.common.privacy.secure_aggregation import TERMS
from perennial.common.survey import SHAPE, SUMS, SURVEY, Asked, Question, Request
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.utils.version import code_digest
from perennial.common.wire import (
    CLIENT,
    CONFIG,
    INSISTS,
    KEPT,
    METRICS,
    REFUSED,
    RESUMED,
    ROUND,
    RUN,
    TASK,
    to_record,
)
from perennial.server.cli.main import app
from perennial.server.run.folder import RunFolder
from perennial.server.run.grid import LocalGrid
from perennial.server.run.loop import run_rounds, start
from perennial.strategies.exchange import AcceptedReply, Exchange
from perennial.strategies.roster import claims
from perennial.testing.tiny_federation import toy_config


def run_of(method: str = "fedavg", *settings: str, rounds: int = 3) -> RunConfig:
    options = {"method": method, "scenario": "colored-digits", "rounds": rounds}
    return load_config(options=options, settings=["scenario.clients=3", *settings])


def asked(config: RunConfig, action: str = "train", number: int = 1, **records: Tensors) -> Message:
    values: dict[str, Any] = {TASK: config.task(), RUN: "run-1", ROUND: number, KEPT: [], RESUMED: []}
    arrays = {name: to_record(tensors) for name, tensors in records.items()}
    return Message(RecordDict({CONFIG: ConfigRecord(values), **arrays}), 1, action)


def announced(config: RunConfig) -> dict[str, str]:
    return {"config": config.model_dump_json()}


def refused(policy: Policy, message: Message, config: RunConfig | None) -> str:
    with pytest.raises(UserError) as caught:
        policy.must_allow(message, announced(config) if config else {})
    return str(caught.value)


def test_a_policy_that_says_nothing_allows_everything() -> None:
    Policy().must_allow(Message(RecordDict(), 1, "train"), {})
    Policy().must_allow_server("anywhere:1")


def test_servers_methods_and_rounds() -> None:
    policy = Policy(servers=("good.example:9092",), methods=("fedavg", "ditto"), max_rounds=5)
    policy.must_allow_server("good.example:9092")
    with pytest.raises(UserError, match=r"allows the servers good.*, and not bad"):
        policy.must_allow_server("bad.example:9092")
    policy.must_allow(asked(run_of()), announced(run_of()))
    other, long = run_of("fedprox"), run_of(rounds=6)
    assert refused(policy, asked(other), other) == (
        "this site's policy does not allow method 'fedprox'; it allows fedavg, ditto"
    )
    assert "does not allow a run of 6 rounds; it allows 5" in refused(policy, asked(long), long)


def test_a_server_that_goes_on_longer_or_otherwise_than_it_announced_is_refused() -> None:
    policy = Policy(max_rounds=5)
    assert "does not allow round 6; it allows 5 rounds" in refused(policy, asked(run_of(), number=6), run_of())
    sentence = refused(policy, asked(run_of("fedavg", "learning_rate=0.5")), run_of())
    assert "the request is not of the run that the server has announced" in sentence
    assert "which the run does not announce" in refused(policy, asked(run_of()), None)


def test_an_announcement_loads_no_module_that_this_site_s_owner_does_not_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may name a plug-in; that one of this name lies in the site's folder is not the owner's word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spy.py").write_text(f"open({str(tmp_path / 'spied')!r}, 'w')\n")
    values = json.loads(run_of().model_dump_json()) | {"plugins": ["spy"]}
    with pytest.raises(UserError, match="spy"):
        Policy(max_rounds=5).must_allow(asked(run_of()), {"config": json.dumps(values)})
    assert not (tmp_path / "spied").exists()


def test_secure_aggregation_is_required_of_the_run_and_of_each_request_and_reply() -> None:
    policy, open_run, hidden = Policy(require="secagg"), run_of(), run_of("fedavg", "privacy.mechanism=secagg")
    terms = {TERMS: {"weight": torch.tensor(1.0)}}
    assert "'train' without secure aggregation; it requires 'secagg'" in refused(policy, asked(hidden), hidden)
    sentence = refused(policy, asked(open_run, "query", 0), open_run)
    assert "does not allow privacy.mechanism 'none'; it requires 'secagg'" in sentence
    for request in (asked(hidden, "query", 0), asked(hidden, **terms), asked(hidden, "train.keys")):
        policy.must_allow(request, announced(hidden))
    model = RecordDict({"model": ArrayRecord(), METRICS: MetricRecord({"loss": 1.0})})
    evaluate = asked(hidden, "evaluate")
    with pytest.raises(UserError, match="'evaluate' without secure aggregation"):
        policy.must_allow_reply(evaluate, Message(model, reply_to=evaluate))
    policy.must_allow_reply(evaluate, Message(RecordDict({METRICS: MetricRecord()}), reply_to=evaluate))
    counts = RecordDict({METRICS: MetricRecord({"global/split/samples": [1, 2]})})
    with pytest.raises(UserError, match="'evaluate' without secure aggregation"):
        policy.must_allow_reply(evaluate, Message(counts, reply_to=evaluate))
    masked = asked(hidden, **terms)
    policy.must_allow_reply(masked, Message(model, reply_to=masked))


def test_where_secure_aggregation_is_required_no_test_rows_are_counted_by_score() -> None:
    """Neither in a run that announces it, nor for a server that asks otherwise than it has announced."""
    policy, secure = Policy(require="secagg"), "privacy.mechanism=secagg"
    counting, quiet = run_of("fedavg", secure, "scores=on"), run_of("fedavg", secure)
    sentence = refused(policy, asked(counting, "query", 0), counting)
    assert sentence.startswith(
        "this site's policy does not allow scores=on; it requires 'secagg', and counts of test"
    )
    policy.must_allow(asked(quiet, "evaluate"), announced(quiet))
    message = asked(quiet, "evaluate")
    message.content.config_records[CONFIG][SCORES] = 100
    assert "counts of test rows by score (scores=on); it requires 'secagg'" in refused(policy, message, quiet)
    ranked = asked(quiet, "evaluate")
    ranked.content.config_records[CONFIG][BATCH] = 4
    assert "counts of test rows by score (scores=on); it requires 'secagg'" in refused(policy, ranked, quiet)
    for name in ("global/test/positives", "global/test/area"):
        told = RecordDict({METRICS: MetricRecord({"global/test/count": [4], name: [1, 2]})})
        with pytest.raises(UserError, match="'evaluate' without secure aggregation"):
            policy.must_allow_reply(message, Message(told, reply_to=message))
    for task, names in (("numbers", {"cells"}), ("event", {"at_risk", "happened", "survival"})):
        own = toy_config(f"fedavg/{task}", secure)
        assert own.scenario.task.scored.keys() == names
        message_of_task = asked(own, "evaluate")
        allowed = {f"global/test/{name}": [4] for name in ("count", "loss", *own.scenario.task.columns)}
        told = RecordDict({METRICS: MetricRecord(allowed)})
        policy.must_allow_reply(message_of_task, Message(told, reply_to=message_of_task))
        for name in names:
            told = RecordDict({METRICS: MetricRecord({**allowed, f"global/test/{name}": [4]})})
            with pytest.raises(UserError, match="'evaluate' without secure aggregation"):
                policy.must_allow_reply(message_of_task, Message(told, reply_to=message_of_task))
    columns = ("count", "correct", "loss")
    told = RecordDict({METRICS: MetricRecord({f"global/test/{name}": [4] for name in columns})})
    policy.must_allow_reply(message, Message(told, reply_to=message))
    Policy(max_rounds=9).must_allow(asked(counting, "evaluate"), announced(counting))


def test_epsilon_is_that_of_all_announced_rounds() -> None:
    """Of the Gaussian mechanism of μ = √T / z: for T = 3, z = 4 and δ = 10⁻⁵ that is 1.70; for z = 1, 8.39."""
    policy = Policy(epsilon=4)
    weak, strong = (run_of("fedavg", "privacy.mechanism=fixed", f"privacy.noise_multiplier={z}") for z in (1, 4))
    policy.must_allow(asked(strong), announced(strong))
    sentence = "privacy.mechanism 'fixed' with epsilon 8.39 after 3 rounds (delta 1e-05); it allows 4"
    assert sentence in refused(policy, asked(weak), weak)
    hollow = weak.model_copy(update={"privacy": weak.privacy.model_copy(update={"delta": 0.999})})
    assert sentence in refused(policy, asked(hollow), hollow), "the server's own δ"
    Policy(epsilon=4, delta=0.05).must_allow(asked(weak), announced(weak))
    assert "privacy.mechanism 'none' with no epsilon; it allows 4" in refused(policy, asked(run_of()), run_of())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("method = ['fedavg']", "method: there is no such setting; did you mean 'methods'?"),
        ("methods = ['fedavgg']", "unknown method 'fedavgg'"),
        ("max_rounds = 0", "max_rounds: 0 is not possible"),
        ("require = 'trust'", "require: 'trust' is not possible"),
        ("epsilon =", "Invalid value"),
        ('require = "secagg"\nepsilon = 4', "require and epsilon are not possible together"),
    ],
)
def test_a_policy_that_cannot_be_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_policy(str(path))
    assert str(caught.value).startswith(f"--policy {path}: ")
    assert sentence in str(caught.value)


def test_the_policy_of_the_page_allows_what_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(servers = .+?)```", page, re.DOTALL)
    (tmp_path / "policy.toml").write_text(text)
    policy, run = read_policy(str(tmp_path / "policy.toml")), run_of("ditto", "privacy.mechanism=secagg")
    policy.must_allow_server("server.example:9092")
    policy.must_allow(asked(run, "query"), announced(run))
    assert "allows fedavg, ditto" in refused(policy, asked(run_of("fedprox")), run_of("fedprox"))
    (tmp_path / "other.toml").write_text(text.replace("require", "# require").replace("# epsilon", "epsilon"))
    assert read_policy(str(tmp_path / "other.toml")).epsilon == 4


def test_a_policy_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As Windows' Notepad writes one."""
    path = tmp_path / "policy.toml"
    path.write_text("max_rounds = 5\n", encoding="utf-8-sig")
    assert read_policy(str(path)).max_rounds == 5


# ---------------------------------------------------------------------- installed code


def flower_run(version: str = perennial.__version__, app: str = installed.APP) -> Run:
    run = Run.create_empty(9)
    run.fab_id, run.fab_version, run.flwr_aid = app, version, "aid"
    return run


def context_of(folder: Path, config: RunConfig | None = None, **settings: Any) -> Context:
    node = {"state-dir": str(folder), "partition-id": 0, "device": "cpu", "superlink": "s:9092", **settings}
    return Context(9, 1, node, RecordDict(), {**(announced(config) if config else {}), "code": code_digest()})


def test_another_version_or_app_is_told_so_in_its_query_s_answer(tmp_path: Path) -> None:
    query, context = asked(run_of(), "query", 0), context_of(tmp_path)
    for run, sentence in (
        (flower_run("9.9"), f"the run is of Perennial 9.9, and this site has {perennial.__version__} installed"),
        (flower_run(app="me/mine"), "the run is of the app 'me/mine', and this site runs its installed perennial"),
    ):
        reply = installed.answer(query, context, run)
        assert str(reply.content.config_records[CONFIG][REFUSED]).startswith(sentence)
        with pytest.raises(UserError, match=sentence):
            installed.answer(asked(run_of()), context, run)


def test_the_policy_s_sentence_is_the_query_s_answer(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('methods = ["ditto"]\n')
    context = context_of(tmp_path, run_of(), policy=str(policy))
    reply = installed.answer(asked(run_of(), "query", 0), context, flower_run())
    config = reply.content.config_records[CONFIG]
    assert config == {
        CLIENT: "client-0",
        REFUSED: "this site's policy does not allow method 'fedavg'; it allows ditto",
    }
    with pytest.raises(UserError, match="does not allow method 'fedavg'"):
        installed.answer(asked(run_of()), context, flower_run())
    policy.write_text('servers = ["other:9092"]\n')
    read_policy.cache_clear()
    with pytest.raises(UserError, match="allows the servers other:9092, and not s:9092"):
        installed.answer(asked(run_of()), context, flower_run())


def test_many_runs_do_not_fill_the_disk_of_a_site_that_bounds_its_state(tmp_path: Path) -> None:
    """A server decides how many runs it asks for, and each keeps a model at the site."""
    policy, state = tmp_path / "policy.toml", tmp_path / "state"
    policy.write_text("max_state = 5000\n")
    context = context_of(state, run_of(), policy=str(policy))
    installed.answer(asked(run_of(), "query", 0), context, flower_run())
    (state / "run-1" / "client-0").mkdir(parents=True)
    (state / "run-1" / "client-0" / "round-1.safetensors").write_bytes(bytes(5001))
    with pytest.raises(UserError, match=r"allows 5000 bytes of state, and \d+ are there"):
        installed.answer(asked(run_of()), context, flower_run())
    (state / "run-1" / "client-0" / "round-1.safetensors").write_bytes(bytes(10))
    (state / "elsewhere").symlink_to(Path(__file__))
    installed.answer(asked(run_of(), "query", 0), context, flower_run())


def test_the_audit_file_says_who_asked_what_was_done_and_what_left(tmp_path: Path) -> None:
    context, message = context_of(tmp_path / "state"), asked(run_of(), number=2)
    model = {"w": torch.zeros(100)}
    content = RecordDict({"model": to_record(model), METRICS: MetricRecord({"loss": 1.0, "num-examples": 3})})
    replies = [
        Message(content, reply_to=message),
        Message(Error(2, "<class 'perennial.common.utils.errors.UserError'>:<'no'>"), reply_to=message),
        Message(RecordDict({CONFIG: ConfigRecord({REFUSED: "not now"})}), reply_to=message),
    ]
    for reply in replies:
        installed.audit(message, context, flower_run(), reply, 1.23456, False)
    installed.audit(message, context, flower_run(), replies[0], 0.0, True)
    path = tmp_path / "state" / installed.AUDIT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, failed, no, again = (json.loads(line) for line in path.read_text().splitlines())
    sent = sum(len(array.data) for array in content.array_records["model"].values())
    assert sent >= 400
    time = first.pop("time")
    assert time.endswith("+00:00")
    assert first == {
        "server": "s:9092", "account": "aid", "app": f"perennial/perennial {perennial.__version__}",
        "code": "same", "flower_run": "9", "action": "train", "run": "run-1", "round": "2", "method": "fedavg",
        "outcome": "answered", "left": {"model": sent, "metrics": 16}, "bytes": sent + 16, "seconds": 1.235,
    }  # fmt: skip
    assert (failed["outcome"], failed["bytes"], "UserError" in failed["reason"]) == ("refused", 0, True)
    assert (no["outcome"], no["reason"]) == ("refused", "not now")
    assert (again["outcome"], again["bytes"]) == ("sent again", sent + 16)


def test_what_a_server_says_makes_no_long_line(tmp_path: Path) -> None:
    task = json.dumps({**json.loads(run_of().task()), "model": {"name": "mlp", "hidden": "x" * 10**6}})
    message = asked(run_of())
    message.content.config_records[CONFIG]["task"] = task
    with pytest.raises(UserError, match=r"model\.hidden: 'x+… is not possible; write a list") as caught:
        parse_task(task)
    assert len(caught.value.told) < 1000
    for error in (UserError("é" * 10**6), ValueError("x" * 10**6)):
        told = error.told if isinstance(error, UserError) else str(error)
        reply = Message(Error(2, told), reply_to=message)
        installed.audit(message, context_of(tmp_path), flower_run(), reply, 0, False)
    assert max(map(len, (tmp_path / installed.AUDIT).read_text().splitlines())) < 3000


def test_the_audit_file_says_what_a_survey_asks(tmp_path: Path) -> None:
    def line(asked: Asked | None, least: int = 10, text: str = "") -> dict[str, Any]:
        text = text or Request(question=Question(least=least), asked=asked).model_dump_json(exclude_defaults=True)
        config = ConfigRecord({SURVEY: text, RUN: "abc", ROUND: 1})
        message = Message(RecordDict({CONFIG: config}), 1, SUMS if asked else SHAPE)
        installed.audit(
            message, context_of(tmp_path), flower_run(), Message(Error(2, "no"), reply_to=message), 0, False
        )
        found: dict[str, Any] = json.loads((tmp_path / installed.AUDIT).read_text().splitlines()[-1])
        return {key: value for key, value in found.items() if key in ("action", "step", "columns", "least")}

    counts = Asked(
        step="counts", classes=("ill",), columns=("age", "thal"), numbers=("age",), values={"age": (1,)}
    )
    assert line(None) == {"action": SHAPE, "least": 10}
    assert line(counts, 11) == {"action": SUMS, "step": "counts", "columns": "age, thal", "least": 11}
    assert line(Asked(step="squares", means={"age": 0}))["columns"] == "age"
    bins = Asked(step="bins", bins={f"{'x' * 90}{number}": (0, 1) for number in range(1000)})
    assert line(bins)["columns"].startswith("xxx")
    assert line(None, text="[]") == {"action": SHAPE}
    assert line(None, text=f'{{"question": {{"least": {"9" * 4000}}}}}') == {"action": SHAPE}
    assert max(map(len, (tmp_path / installed.AUDIT).read_text().splitlines())) < 3000


def test_an_audit_file_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / installed.AUDIT).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        installed.audit(
            asked(run_of()),
            context_of(tmp_path),
            flower_run(),
            Message(Error(2, ""), reply_to=asked(run_of())),
            0,
            False,
        )
    assert not (tmp_path / "elsewhere").exists()


def test_a_line_that_a_full_disk_has_cut_off_costs_no_other(tmp_path: Path) -> None:
    file = tmp_path / installed.AUDIT
    file.write_text('{"whole": 1}\n{"outcome": "answ')
    for number in range(2):
        installed._append(file, f'{{"next": {number}}}\n')
    whole, cut, *rest = file.read_text().splitlines()
    assert [whole, cut, *rest] == ['{"whole": 1}', '{"outcome": "answ', '{"next": 0}', '{"next": 1}']


# ---------------------------------------------------------------------- which sites insist


class Sites(LocalGrid):
    """Sites with policies, which answer with installed code; every message travels as bytes."""

    def __init__(self, config: RunConfig, path: Path, policies: dict[int, str]) -> None:
        self.said: list[Message] = []
        contexts = {}
        for number in range(len(config.scenario.client_ids)):
            folder = path / str(number)
            folder.mkdir(parents=True)
            (folder / "policy.toml").write_text(policies.get(number, ""))
            settings = {"partition-id": number, "policy": str(folder / "policy.toml"), "data-root": ""}
            contexts[number] = context_of(folder, config, **settings)

        def answer(message: Message, context: Context) -> Message:
            own = contexts[int(context.node_config["partition-id"])]
            metadata = message.metadata
            sent = Message(
                carried(message.content), metadata.dst_node_id, metadata.message_type, group_id=metadata.group_id
            )
            reply = Message(carried(installed.answer(sent, own, flower_run()).content), reply_to=message)
            self.said.append(reply)
            return reply

        super().__init__(answer, len(contexts))  # type: ignore[arg-type]


def test_a_run_shows_which_sites_insist_on_its_protection(tmp_path: Path) -> None:
    config = toy_config("fedavg", "privacy.mechanism=secagg", rounds=2)
    policies = {0: 'require = "secagg"\n', 2: 'require = "secagg"\nmax_rounds = 9\n', 3: 'methods = ["fedavg"]\n'}
    grid, folder = Sites(config, tmp_path / "sites", policies), RunFolder.create(tmp_path / "run", config)
    summary = run_rounds(config, folder, grid, start(config))
    insists = {"client-0": "secure aggregation", "client-2": "secure aggregation"}
    assert summary["insists"] == folder.summary()["insists"] == insists
    assert summary["left_out"] == {}
    shown = CliRunner().invoke(app, ["show", "run", str(folder.path)])
    assert "sites that insist on secure aggregation: client-0, client-2" in " ".join(shown.output.split())
    said = [reply.content.config_records.get(CONFIG, {}).get(INSISTS) for reply in grid.said]
    assert sorted(filter(None, said)) == ["secure aggregation"] * 2, "once, when the run begins"


def test_a_site_that_insists_on_epsilon_is_shown_and_another_that_gets_less_is_left_out(tmp_path: Path) -> None:
    config = toy_config("fedavg", "privacy.mechanism=fixed", "privacy.noise_multiplier=4", rounds=2)
    policies = {0: "epsilon = 4\n", 1: "epsilon = 0.1\n", 2: 'require = "secagg"\n'}
    grid, folder = Sites(config, tmp_path / "sites", policies), RunFolder.create(tmp_path / "run", config)
    summary = run_rounds(config, folder, grid, start(config))
    assert summary["insists"] == {"client-0": "epsilon 4"}
    assert summary["left_out"].keys() == {"client-1", "client-2"}
    assert summary["left_out"]["client-1"]["last"].endswith(
        f"epsilon {epsilon(4, 2, 1e-5):.3g} after 2 rounds (delta 1e-05); it allows 0.1"
    )


def test_of_sites_that_insist_on_nothing_nothing_is_said(tmp_path: Path) -> None:
    config = toy_config("fedavg", rounds=1)
    folder = RunFolder.create(tmp_path / "run", config)
    assert "insists" not in run_rounds(config, folder, Sites(config, tmp_path / "sites", {}), start(config))
    assert "sites that insist" not in CliRunner().invoke(app, ["show", "run", str(folder.path)]).output


def test_what_a_site_says_that_it_insists_on_is_cut(tmp_path: Path) -> None:
    exchange = Exchange("query", 0, {7: "node 7", 8: "node 8"}, lambda _: {})
    said = [("node 7", "\x1b[2J" + 500 * "x"), ("node 8", 5)]
    replies = [
        AcceptedReply(node, {}, MetricRecord(), ConfigRecord({CLIENT: node, INSISTS: text})) for node, text in said
    ]
    found = {node: claim.insists for node, claim in claims(exchange, replies).items()}
    assert len(found[7]) <= 100
    assert found[7].isprintable()
    assert found[8] == "5"
