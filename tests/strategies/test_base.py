import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from scripted_clients import ENROLLED

from perennial.common.config import load_config
from perennial.common.stacks import StackReply
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.wire import CONFIG, METRICS, MODEL, REFUSED, to_record
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, AcceptedStack, Exchange, MetricMeans
from perennial.strategies.screening import Limits, Rejected

Answer = Callable[[str, Message], RecordDict | Error | None]


class FakeGrid(Grid):
    """Nodes 100, 99, … are clients client-0, client-1, …; each answers as told, the last node first.

    Those in `refusals` say of themselves why they cannot take part.
    """

    def __init__(self, clients: list[str], answer: Answer, refusals: Mapping[str, str] | None = None) -> None:
        self.names = {100 - number: name for number, name in enumerate(clients)}
        self.answer = answer
        self.refusals = refusals or {}
        self.sent: list[Message] = []

    def get_node_ids(self) -> list[int]:
        return sorted(self.names)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        for message in messages:
            self.sent.append(message)
            name = self.names[message.metadata.dst_node_id]
            if message.metadata.message_type == "query":
                refusal = {REFUSED: self.refusals[name]} if name in self.refusals else {}
                config = ConfigRecord({"client": name, **refusal})
                found: Any = RecordDict({CONFIG: config, METRICS: ENROLLED})
            else:
                found = self.answer(name, message)
            if found is not None:
                replies.append(Message(found, reply_to=message))
        return sorted(replies, key=lambda reply: reply.metadata.src_node_id)

    def _absent(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    set_run = create_message = push_messages = pull_messages = _absent
    run = property(_absent)


def strategy(*settings: str) -> MethodStrategy[Any]:
    config = load_config(options={"method": "fedavg", "scenario": "colored-digits"}, settings=settings)
    return MethodStrategy(config, "run-1")


def model(value: float) -> ArrayRecord:
    return to_record({"w": torch.full((2,), float(value))})


def trained(value: float, count: int, **metrics: float) -> RecordDict:
    return RecordDict({MODEL: model(value), METRICS: MetricRecord({"num-examples": count, **metrics})})


def train(
    method: MethodStrategy[Any], grid: Grid, number: int = 1
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    requests = method.configure_train(number, model(0), ConfigRecord(), grid)
    return method.aggregate_train(number, grid.send_and_receive(requests))


def evaluate(method: MethodStrategy[Any], grid: Grid) -> MetricRecord | None:
    requests = method.configure_evaluate(1, model(0), ConfigRecord(), grid)
    return method.aggregate_evaluate(1, grid.send_and_receive(requests))


CLIENTS = list(strategy().run.scenario.client_ids)


def number(client: str) -> int:
    return CLIENTS.index(client)


def test_the_model_is_the_sample_weighted_mean_and_requests_go_in_client_order() -> None:
    grid = FakeGrid(CLIENTS, lambda name, _: trained(number(name), 10 * (number(name) + 1), risk=number(name)))
    arrays, metrics = train(strategy(), grid)
    total = sum(10 * (i + 1) for i in range(len(CLIENTS)))
    mean = sum(10 * (i + 1) * i for i in range(len(CLIENTS))) / total
    assert arrays is not None
    assert metrics is not None
    assert arrays["w"].numpy() == pytest.approx(mean)
    assert metrics["risk"] == pytest.approx(mean)
    assert metrics["num-examples"] == total
    assert [grid.names[m.metadata.dst_node_id] for m in grid.sent if m.metadata.message_type == "train"] == CLIENTS


@pytest.mark.parametrize("name", ["task", "run", "round", "kept", "resumed"])
def test_a_server_half_cannot_set_what_the_protocol_says(name: str) -> None:
    method = strategy()
    method.settings = lambda _: {name: 1}  # type: ignore[method-assign]
    with pytest.raises(
        UserError, match=f"the server half of 'fedavg' has a setting '{name}', which is one of the"
    ):
        train(method, FakeGrid(CLIENTS, lambda client, _: trained(number(client), 1)))


@pytest.mark.parametrize("name", [CONFIG, METRICS])
@pytest.mark.parametrize("hook", ["training_payload", "expect"])
def test_a_server_half_cannot_have_a_record_of_the_protocol(name: str, hook: str) -> None:
    method = strategy()
    own = method.training_payload
    setattr(method, hook, lambda model: {**own(model), name: model})
    with pytest.raises(
        UserError, match=f"the server half's '{name}' in .* is a record of the protocol; give yours"
    ):
        train(method, FakeGrid(CLIENTS, lambda client, _: trained(number(client), 1)))


def test_a_metric_is_averaged_over_those_who_report_it() -> None:
    means = MetricMeans()
    for client, metrics in {"a": {"num-examples": 1, "risk": 2.0}, "b": {"num-examples": 3}}.items():
        means.add(AcceptedReply(client, {}, MetricRecord(metrics), ConfigRecord()))
    assert dict(means.result()) == {"risk": 2.0, "num-examples": 4}


def stack_of_three(**worst: float) -> tuple[Exchange, StackReply]:
    """Clients a, b and c, of which b has other numbers where told so, and their stack's answer."""
    like = {MODEL: {"w": torch.zeros(2)}}
    exchange = Exchange("train", 1, {1: "a", 2: "b", 3: "c"}, lambda _: like)
    tensors = torch.tensor([[1.0, 2.0], [worst.get("w", 3.0), 4.0], [5.0, 6.0]])
    metrics = {"num-examples": [1, 2, 3], "risk": [0.1, worst.get("risk", 0.2), 0.3]}
    return exchange, StackReply([1, 2, 3], {MODEL: {"w": tensors}}, metrics, {})


def test_a_stack_comes_as_one_where_all_its_replies_can_be_used() -> None:
    exchange, reply = stack_of_three()
    (stack,) = exchange.accepted_together([reply], Limits(strategy().run), 1.0)
    assert isinstance(stack, AcceptedStack)
    again, reply = stack_of_three()
    each = list(again.accepted([reply], Limits(strategy().run), 1.0))
    for place, own in enumerate(each):
        same = stack.reply(place)
        assert (own.client, own.metrics, own.nbytes) == (same.client, same.metrics, same.nbytes)
        assert torch.equal(own[MODEL]["w"], same[MODEL]["w"])
    assert exchange.samples == again.samples == {"a": 1, "b": 2, "c": 3}
    assert exchange.bytes_up == again.bytes_up == 3 * 8
    one_by_one, together = MetricMeans(), MetricMeans()
    for own in each:
        one_by_one.add(own)
    together.add(stack)
    assert (
        dict(together.result()) == dict(one_by_one.result()) == {"risk": pytest.approx(1.4 / 6), "num-examples": 6}
    )


@pytest.mark.parametrize("worst", [{"w": float("nan")}, {"risk": float("inf")}])
def test_a_stack_with_a_reply_that_cannot_be_used_comes_one_by_one(worst: dict[str, float]) -> None:
    exchange, reply = stack_of_three(**worst)
    found = list(exchange.accepted_together([reply], Limits(strategy().run), 0.5))
    assert [own.client for own in found if isinstance(own, AcceptedReply)] == ["a", "c"]
    assert exchange.left_out.keys() == {"b"}
    exchange, reply = stack_of_three(**worst)
    with pytest.raises(RunStopped, match="only 2 of 3 clients"):
        list(exchange.accepted_together([reply], Limits(strategy().run), 1.0))


def test_the_cohort_depends_on_seed_and_round_and_not_on_who_is_there() -> None:
    few, all_ = FakeGrid(CLIENTS[:1], lambda *_: None), FakeGrid(CLIENTS, lambda *_: None)
    settings = ["participation=0.5"]
    draws = [strategy(*settings).sample(round_, all_) for round_ in range(1, 20)]
    assert draws == [strategy(*settings).sample(round_, few) for round_ in range(1, 20)]
    assert {len(draw) for draw in draws} == {max(1, round(len(CLIENTS) / 2))}
    assert all(draw == sorted(draw) for draw in draws)
    assert {client for draw in draws for client in draw} == set(CLIENTS)
    assert draws != [strategy(*settings, "seed=1").sample(round_, all_) for round_ in range(1, 20)]


def test_unusable_replies_are_left_out_and_named() -> None:
    method = strategy("quorum=0")
    answers: dict[str, Any] = {
        CLIENTS[0]: Error(2, "<class 'my.module.Odd'>:<'no\n memory'>"),
        CLIENTS[1]: None,
        CLIENTS[2]: Error(4, "did not answer in time"),
        CLIENTS[3]: Error(5, "Error: Node Unavailable — The destination node failed to report a heartbeat"),
        CLIENTS[4]: Error(8, "ClientApp stopped responding."),
        CLIENTS[5]: Error(3, "Reply message objects are unavailable. The sender may not have completed …"),
    }
    arrays, _ = train(method, FakeGrid(CLIENTS, lambda name, _: answers.get(name, trained(7, 1))))
    assert arrays is None or arrays["w"].numpy().tolist() == [7, 7]
    assert method.exchanges[-1].left_out == {
        CLIENTS[0]: "failed: no memory (Odd)",
        CLIENTS[1]: "did not answer in time",
        CLIENTS[2]: "did not answer in time",
        CLIENTS[3]: "is gone: it has left, or has sent no heartbeat for a minute",
        CLIENTS[4]: "failed: ClientApp stopped responding. (code 8)",
        CLIENTS[5]: "its answer broke off, or cannot be read",
    }


@pytest.mark.parametrize("order", [1, -1])
def test_a_reply_that_comes_twice_counts_once_and_for_nobody_else(order: int) -> None:
    """The first of the two counts. One of an earlier round, of a node that is not asked now, counts as nothing."""

    class Doubling(FakeGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            replies = super().send_and_receive(messages, timeout=timeout)[::order]
            if replies[0].metadata.message_type == "query":
                return replies
            again = [Message(trained(1e6, 10**6), reply_to=reply) for reply in replies]
            for late, reply in zip(again[1:], replies[1:], strict=True):
                late.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
            again[0].metadata.__dict__["_src_node_id"] = 1  # no node that is asked now
            return [two for pair in zip(replies, again, strict=True) for two in pair]

    def answer(name: str, _: Message) -> RecordDict | None:
        return None if name == CLIENTS[1] else trained(number(name), 10)

    once, twice = strategy("quorum=0"), strategy("quorum=0")
    arrays, metrics = train(once, FakeGrid(CLIENTS, answer))
    assert train(twice, Doubling(CLIENTS, answer)) == (arrays, metrics)
    assert twice.exchanges[-1].samples == dict.fromkeys([CLIENTS[0], *CLIENTS[2:]], 10)
    assert twice.exchanges[-1].bytes_up == once.exchanges[-1].bytes_up
    assert twice.exchanges[-1].left_out == {CLIENTS[1]: "did not answer in time"}
    missing = f"only {len(CLIENTS) - 1} of {len(CLIENTS)} clients gave a usable answer"
    with pytest.raises(RunStopped, match=missing):
        train(strategy("quorum=1"), Doubling(CLIENTS, answer))


def test_a_site_that_cannot_take_part_is_named_with_its_reason_until_it_is_gone() -> None:
    method, reason = strategy("quorum=0"), "there is no column 'age'\nin its table" + "!" * 1000
    names = [*CLIENTS[:-1], "a stranger"]
    grid = FakeGrid(names, lambda *_: trained(1, 1), refusals={CLIENTS[0]: reason})
    train(method, grid)
    said = ("there is no column 'age' in its table" + "!" * 1000)[:300] + " …"
    stranger = {f"node {101 - len(CLIENTS)}": "says that it is 'a stranger', which is none of this run's clients"}
    assert method.roster.refused == {CLIENTS[0]: said, **stranger}
    assert method.exchanges[-1].left_out == {CLIENTS[0]: said, CLIENTS[-1]: "is not connected"}
    assert list(method.roster.nodes) == CLIENTS[1:-1]
    asked = len(grid.sent)
    method.enrol(grid)
    assert len(grid.sent) == asked  # nobody is asked twice
    grid.names = {node: name for node, name in grid.names.items() if name != CLIENTS[0]}
    method.enrol(grid)
    assert method.roster.refused == stranger


class Away(FakeGrid):
    """The SuperLink answers for `away`, or nobody does."""

    away: int | None = None
    error: Error | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.queries: list[tuple[list[int], float | None]] = []
        """Who was asked which client it is, and the seconds for it."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        asked = list(messages)
        if asked and asked[0].metadata.message_type == "query":
            self.queries.append(([message.metadata.dst_node_id for message in asked], timeout))
        lost = [message for message in asked if message.metadata.dst_node_id == self.away]
        found = super().send_and_receive([message for message in asked if message not in lost])
        return [*(Message(self.error, reply_to=message) for message in lost if self.error), *found]


@pytest.mark.parametrize("error", [Error(4, "did not answer in time"), Error(5, "Node Unavailable"), None])
def test_a_node_that_did_not_answer_when_it_was_asked_is_asked_again(error: Error | None) -> None:
    """One that was loading its data; or a registered site, which comes back under the node id that it had."""
    method, grid = strategy("quorum=0"), Away(CLIENTS, lambda *_: trained(1, 1))
    grid.away, grid.error = 100, error
    train(method, grid)
    assert list(method.roster.nodes) == CLIENTS[1:]
    assert method.exchanges[-1].left_out == {CLIENTS[0]: "is not connected"}
    grid.away = None
    train(method, grid, 2)
    assert list(method.roster.nodes) == CLIENTS
    assert method.exchanges[-1].left_out == {}


def test_a_node_that_hangs_costs_few_rounds_some_seconds_and_one_that_joins_is_asked_at_once() -> None:
    """It is no client of the run; the others are there from the start."""
    method = strategy("quorum=0", "wait=120", "deadline=600")
    grid = Away([*CLIENTS, "nobody's"], lambda *_: None)
    every, hangs = sorted(grid.names), min(grid.names)
    grid.away = hangs
    for _ in range(2):  # until they are there, a run that begins asks again and again
        method.enrol(grid)
    assert grid.queries == [(every, 120), ([hangs], 120)]
    rounds = {}
    for number in range(1, 40):
        grid.queries.clear()
        train(method, grid, number)
        evaluate(method, grid)
        if grid.queries:
            rounds[number] = list(grid.queries)
        assert method.roster.refused == {f"node {hangs}": "did not answer in time"}
    assert rounds == {number: [([hangs], 10)] for number in (1, 3, 7, 15, 23, 31, 39)}
    grid.names[7] = "late"
    grid.queries.clear()
    train(method, grid, 40)
    assert grid.queries == [([7], 120)]
    del grid.names[hangs]
    train(method, grid, 41)
    grid.names[hangs] = "nobody's"
    train(method, grid, 42)
    assert grid.queries[1:] == [([hangs], 120)]  # it was gone, so it is new


def test_no_query_waits_longer_than_an_exchange_and_a_simulations_nodes_have_a_second_each() -> None:
    for settings, seconds in ((("deadline=6", "wait=3"), 6), (("deadline=60", "wait=3"), 8), (("wait=30",), 30)):
        grid = Away(CLIENTS, lambda *_: None)
        strategy("quorum=0", *settings).enrol(grid)
        assert grid.queries == [(sorted(grid.names), seconds)]


def test_nobody_can_speak_for_a_site_that_takes_part() -> None:
    """A node that says that another one's site cannot take part changes nothing in the log."""
    method, grid = strategy("quorum=0"), FakeGrid(CLIENTS, lambda *_: trained(1, 1))
    method.enrol(grid)
    grid.names[1], grid.refusals = CLIENTS[0], {CLIENTS[0]: "has no data"}
    method.enrol(grid)
    assert method.roster.refused == {}
    assert list(method.roster.nodes) == CLIENTS


def test_a_node_that_does_not_say_who_it_is_is_named_by_its_number() -> None:
    method, grid = strategy("quorum=0"), FakeGrid([*CLIENTS, ""], lambda *_: trained(1, 1))
    method.enrol(grid)
    assert method.roster.refused == {
        f"node {100 - len(CLIENTS)}": "says that it is '', which is none of this run's clients",
    }


def test_a_methods_own_check_leaves_a_reply_out_and_it_does_not_count_for_the_quorum() -> None:
    def check(reply: AcceptedReply) -> None:
        if reply.client == CLIENTS[0]:
            raise Rejected("answered out of turn")

    def go(quorum: str) -> tuple[MethodStrategy[Any], list[str]]:
        method, grid = strategy(quorum), FakeGrid(CLIENTS, lambda *_: trained(1, 1))
        requests = method.configure_train(1, model(0), ConfigRecord(), grid)
        return method, [reply.client for reply in method.accepted(grid.send_and_receive(requests), check=check)]

    method, used = go("quorum=0.5")
    assert used == CLIENTS[1:]
    assert method.exchanges[-1].left_out == {CLIENTS[0]: "answered out of turn"}
    with pytest.raises(RunStopped, match="client-0: answered out of turn"):
        go("quorum=1")


def test_an_optional_record_may_be_there_but_must_fit() -> None:
    def answer(name: str, _: Message) -> RecordDict:
        extra = {CLIENTS[0]: {"extra": torch.ones(3)}, CLIENTS[1]: {"extra": torch.ones(4)}}.get(name)
        return RecordDict({**trained(1, 1), **({"more": to_record(extra)} if extra else {})})

    method, grid = strategy("quorum=0"), FakeGrid(CLIENTS, answer)
    method.enrol(grid)
    like = {MODEL: {"w": torch.zeros(2)}}, {"more": {"extra": torch.zeros(3)}}
    requests = method.messages(1, CLIENTS, "train", {}, expect=like[0], optional=like[1])
    found = {reply.client: set(reply.arrays) for reply in method.accepted(grid.send_and_receive(requests))}
    assert found == {CLIENTS[0]: {MODEL, "more"}, **{client: {MODEL} for client in CLIENTS[2:]}}
    assert method.exchanges[-1].left_out.keys() == {CLIENTS[1]}
    assert "shape (4,) instead of (3,)" in method.exchanges[-1].left_out[CLIENTS[1]]


@pytest.mark.parametrize(("quorum", "asked", "need"), [(0.55, 20, 11), (0.07, 100, 7), (0.5, 3, 2), (1, 3, 3)])
def test_the_quorum_is_of_those_asked(quorum: float, asked: int, need: int) -> None:
    """0.55 · 20 is 11.000000000000002 in floating point, but eleven clients are enough."""

    def go(answering: int) -> None:
        method = strategy(f"quorum={quorum}")
        names = [f"client-{i:03d}" for i in range(asked)]
        method.roster.nodes = {name: 100 - i for i, name in enumerate(names)}
        grid = FakeGrid(names, lambda name, _: trained(1, 1) if names.index(name) < answering else None)
        expect = {MODEL: {"w": torch.zeros(2)}}
        requests = method.messages(1, names, "train", {}, expect=expect)
        method.aggregate_train(1, grid.send_and_receive(requests))

    go(need)
    with pytest.raises(RunStopped, match=f"only {need - 1} of {asked} clients gave a usable answer to 'train'"):
        go(need - 1)


# ---------------------------------------------------------------------- evaluation

TEST = list(strategy().run.scenario.test_environments)


def evaluation(changes: dict[str, Any], names: dict[str, list[str]] | None = None) -> RecordDict:
    columns: dict[str, Any] = {
        "global/validation/count": [4], "global/validation/correct": [1], "global/validation/loss": [0.5],
        "global/test/count": [10] * len(TEST), "global/test/correct": [5] * len(TEST),
        "global/test/loss": [1.0] * len(TEST),
    }  # fmt: skip
    columns = {key: value for key, value in (columns | changes).items() if value is not None}
    settings = {"validation": ["validation"], "test": TEST, **(names or {})}
    return RecordDict({METRICS: MetricRecord(columns), CONFIG: ConfigRecord(settings)})  # type: ignore[arg-type]


def test_rows_hold_counts_by_client_model_and_split() -> None:
    method = strategy()
    metrics = evaluate(method, FakeGrid(CLIENTS, lambda *_: evaluation({})))
    assert dict(metrics or {}) == {"global/accuracy": 0.5}
    assert [row["client"] for row in method.evaluation] == [client for client in CLIENTS for _ in range(2)]
    assert method.evaluation[0] == {
        "kind": "evaluation", "round": 1, "client": CLIENTS[0], "model": "global", "split": "validation",
        "environment": ["validation"], "count": [4], "correct": [1], "loss": [0.5],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"global/test/correct": [11] * len(TEST)}, {}),
        ({"global/test/correct": [-1] * len(TEST)}, {}),
        ({"global/test/correct": [5] * (len(TEST) + 1)}, {}),
        ({"global/test/correct": 5}, {}),
        ({"global/test/loss": None}, {}),
        ({"global/test/kind": [1] * len(TEST)}, {}),
        ({"global": 1}, {}),
        ({"global/train/count": [1], "global/train/correct": [1], "global/train/loss": [1]}, {"train": ["x"]}),
        ({"other/test/count": [1], "other/test/correct": [1], "other/test/loss": [1]}, {"test": TEST[:1]}),
        ({}, {"test": ["an environment of its own"] * len(TEST)}),
        ({}, {"test": TEST[:1] * len(TEST)}),
        ({}, {"test": 7}),
        ({}, {"more": ["x"]}),
        (
            {"global/test/count": [5e-324] * len(TEST), "global/test/correct": [0.0] * len(TEST)},
            {},
        ),  # 1 / it = inf
        ({"global/test/count": [2**62] * len(TEST)}, {}),
        ({"global/test/correct": [0.5] * len(TEST)}, {}),
        ({"global/test/loss": [1.0] * 100_000}, {}),
    ],
)
def test_an_evaluation_that_does_not_fit_is_left_out(changes: dict[str, Any], names: dict[str, list[str]]) -> None:
    """Otherwise one client could end the run, or put an environment into everybody's worst case."""
    method = strategy("quorum=0")
    grid = FakeGrid(CLIENTS, lambda name, _: evaluation(changes, names) if name == CLIENTS[0] else evaluation({}))
    evaluate(method, grid)
    assert method.exchanges[-1].left_out.keys() == {CLIENTS[0]}
    assert "cannot be read" in method.exchanges[-1].left_out[CLIENTS[0]]
    assert {row["client"] for row in method.evaluation} == set(CLIENTS[1:])


def test_an_evaluation_that_does_not_fit_does_not_count_for_the_quorum() -> None:
    method, bad = strategy("quorum=0.5"), {"global/test/correct": [11] * len(TEST)}
    few = CLIENTS[: len(CLIENTS) // 2 - 1]
    grid = FakeGrid(CLIENTS, lambda name, _: evaluation({} if name in few else bad))
    with pytest.raises(RunStopped, match=f"only {len(few)} of {len(CLIENTS)} clients gave a usable answer"):
        evaluate(method, grid)


def test_a_client_without_test_samples_does_no_harm() -> None:
    empty = {"global/test/count": [0] * len(TEST), "global/test/correct": [0] * len(TEST)}
    method = strategy()
    metrics = evaluate(method, FakeGrid(CLIENTS, lambda *_: evaluation(empty)))
    assert dict(metrics or {}) == {}
    assert len(method.evaluation) == 2 * len(CLIENTS)


# ---------------------------------------------------------------------- what a reply may cost

CRAFTED = "<class '" + ".x'>:<'" * 40_000 + "z"
"""A pattern with a repetition in a repetition looks at this for minutes."""


@pytest.mark.parametrize("action", ["query", "train"])
def test_a_crafted_error_text_is_cut_before_it_is_looked_at(action: str) -> None:
    exchange = Exchange(action, 1, {1: "a"}, lambda _: {})
    (request,) = exchange.requests(lambda _: {}, ConfigRecord())
    replies = [Message(Error(2, CRAFTED), reply_to=request)]
    assert not list(exchange.accepted(replies, Limits(strategy().run), 0.0))
    assert exchange.left_out["a"].startswith("failed: .x'>:<'.x'>:<'")
    assert len(exchange.left_out["a"]) < 310


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<class 'RuntimeError'>:<'out of memory'>", "failed: out of memory (RuntimeError)"),
        ("<class 'a.b.Own'>:<\"it's gone\">", "failed: it's gone (Own)"),
        ("<class 'a.f.<locals>.Own'>:<'x'>", "failed: x (Own)"),
        ("<class 'ValueError'>:<'" + "y" * 5000 + "'>", "failed: " + "y" * 292 + " …"),
        ("anything else", "failed: anything else (code 2)"),
        ("", "failed: no reason given (code 2)"),
        (" \n\t ", "failed: no reason given (code 2)"),
        ("\x1b[31m\x1b]0;x\x07", "failed: no reason given (code 2)"),
        (
            "<class 'ray.exceptions.RayTaskError'>:<'\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=7)\n no'>",
            "failed: ray::ClientAppActor.run() (pid=7) no (RayTaskError)",
        ),
    ],
)
def test_an_exception_is_shown_by_its_text_and_its_kind(text: str, shown: str) -> None:
    exchange = Exchange("train", 1, {1: "a"}, lambda _: {})
    (request,) = exchange.requests(lambda _: {}, ConfigRecord())
    assert not list(exchange.accepted([Message(Error(2, text), reply_to=request)], Limits(strategy().run), 0.0))
    assert exchange.left_out == {"a": shown}


def test_whatever_a_check_raises_is_that_client_s_fault() -> None:
    def check(reply: AcceptedReply) -> None:
        if reply.client == CLIENTS[2]:
            raise OverflowError("int too large to convert to float")

    method = strategy()
    grid = FakeGrid(CLIENTS, lambda *_: trained(1, 1))
    requests = method.configure_train(1, model(0), ConfigRecord(), grid)
    used = [reply.client for reply in method.accepted(grid.send_and_receive(requests), check=check)]
    assert used == [client for client in CLIENTS if client != CLIENTS[2]]
    word = "its answer cannot be used (OverflowError: int too large to convert to float)"
    assert method.exchanges[-1].left_out == {CLIENTS[2]: word}


def test_a_metric_of_training_cannot_pass_for_an_accuracy() -> None:
    method = strategy()
    lie = {"personal/accuracy": 1.0}
    grid = FakeGrid(CLIENTS, lambda name, _: trained(1, 1, **(lie if name == CLIENTS[0] else {})))
    _, metrics = train(method, grid)
    assert metrics is not None
    assert metrics.keys() == {"num-examples"}
    assert method.exchanges[-1].left_out == {CLIENTS[0]: "metric 'personal/accuracy' is for evaluations alone"}


@pytest.mark.parametrize("action", ["train", pytest.param("evaluate", marks=pytest.mark.slow)])
def test_lists_without_end_are_left_out_and_not_kept(action: str) -> None:
    """Twenty lists of 10^5 numbers from each client: 16 MB, of which nothing may stay."""
    method = strategy("quorum=0", "most_metric_bytes=1000000")

    def endless(*_: object) -> RecordDict:
        lists = {f"global/test/{number}": [float(number)] * 100_000 for number in range(20)}
        arrays = {MODEL: model(0)} if action == "train" else {}
        return RecordDict({**arrays, METRICS: MetricRecord({"num-examples": 1, **lists})})

    grid = FakeGrid(CLIENTS, endless)
    requests = {
        "train": lambda: method.configure_train(1, model(0), ConfigRecord(), grid),
        "evaluate": lambda: method.configure_evaluate(1, model(0), ConfigRecord(), grid),
    }[action]()
    replies = (reply for request in requests for reply in grid.send_and_receive([request]))  # one is held at once
    tracemalloc.start()
    if action == "train":
        method.aggregate_train(1, replies)
    else:
        method.aggregate_evaluate(1, replies)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert method.exchanges[-1].left_out.keys() == set(CLIENTS)
    assert {"most_metric_bytes" in reason for reason in method.exchanges[-1].left_out.values()} == {True}
    assert kept < 1_000_000
    assert peak < 2.1 * 20 * 8 * 100_000  # of two replies: one is made while the one before is let go
