import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import pytest
from flwr.app import DEFAULT_TTL, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.retry import make_simple_grpc_retry_invoker
from flwr.supercore.retry.retry_invoker import RetryState
from flwr.superlink.grid import GrpcGrid

from perennial.common.flower.request_id import name_of
from perennial.common.utils.errors import UserError
from perennial.server.run.grid import LocalGrid, OrderedGrid


def request(node: int) -> Message:
    return Message(RecordDict({"config": ConfigRecord({"node": node})}), node, "train", group_id="1")


class SlowLink(Grid):
    """A SuperLink whose nodes' replies become available one by one, in the given order, at each pull."""

    def __init__(self, order: list[int], lost: Iterable[int] = (), unsent: Iterable[int | None] = ()) -> None:
        self.order, self.lost, self.unsent = order, set(lost), set(unsent)
        self.waiting: dict[str, Message] = {}
        self.there: set[int] = set()
        self.pulls: list[list[str]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[Any]:
        if None in self.unsent:
            return []  # what GrpcGrid gives when the SuperLink's resources are exhausted
        ids: list[Any] = []
        for message in messages:
            node = message.metadata.dst_node_id
            name = self.id_of(node)
            message.metadata.__dict__.update(_run_id=5, _src_node_id=1, _message_id=name)
            ids.append(None if node in self.unsent else name)
            self.waiting[name] = message
        return ids

    def id_of(self, node: int) -> str:
        return f"id-{node}"

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ids = list(message_ids)
        self.pulls.append(ids)
        if self.order:
            self.there.add(self.order.pop(0))
        found = [self.waiting[name] for name in ids]
        return [self._answer(message) for message in found if message.metadata.dst_node_id in self.there]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node not in self.lost:
            return Message(RecordDict({"metrics": MetricRecord({"node": node})}), reply_to=message)
        reply = Message(Error(5, "Node Unavailable"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1  # in the SuperLink's own name, as the real one does
        return reply

    def get_node_ids(self) -> list[int]:
        return [1, 2]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise AssertionError("polls every three seconds")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        self.seen = run

    @property
    def run(self) -> Any:
        return self.seen


def nodes(replies: Iterable[Message]) -> list[int]:
    return [reply.metadata.src_node_id for reply in replies]


@pytest.mark.parametrize("seed", range(5))
def test_replies_come_in_the_order_of_requests_whatever_arrives_first(seed: int) -> None:
    wanted = [11, 2, 7, 30, 4]
    arrival = random.Random(seed).sample(wanted, 5)
    replies = list(OrderedGrid(SlowLink(arrival), poll=0).send_and_receive(map(request, wanted)))
    assert nodes(replies) == wanted
    assert [reply.content["metrics"]["node"] for reply in replies] == wanted  # type: ignore[index]


def test_each_reply_is_given_as_soon_as_it_is_its_turn_and_pulled_once() -> None:
    link = SlowLink([1, 2, 3])
    replies = OrderedGrid(link, poll=0).send_and_receive([request(n) for n in (1, 2, 3)])
    assert isinstance(replies, Iterator)
    assert nodes([next(replies)]) == [1]
    assert link.there == {1}  # the others have not even arrived
    assert nodes(replies) == [2, 3]
    assert link.pulls == [["id-1"], ["id-2"], ["id-3"]]


def test_an_error_in_the_superlinks_name_is_given_in_the_nodes() -> None:
    replies = list(OrderedGrid(SlowLink([3, 2, 1], lost=[2]), poll=0).send_and_receive(map(request, [1, 2, 3])))
    assert nodes(replies) == [1, 2, 3]
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert (replies[1].error.code, replies[1].error.reason) == (5, "Node Unavailable")
    assert replies[1].metadata.reply_to_message_id == "id-2"


class HostileLink(SlowLink):
    """All replies are there. Node 1 answers in the name of node 3, node 2 sends what makes Flower raise; node 3
    has stopped in the midst of its upload, if `stuck`."""

    stuck = False

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        (name,) = message_ids
        if name == "id-2":
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        if name == "id-3" and self.stuck:
            time.sleep(60)
        reply = self._answer(self.waiting[name])
        if name == "id-1":
            reply.metadata.__dict__["_src_node_id"] = 3
        return [reply]


def test_a_client_cannot_answer_for_another_one_nor_end_the_run() -> None:
    for timeout in (None, 5.0):
        grid = OrderedGrid(HostileLink([]), poll=0)
        replies = list(grid.send_and_receive(map(request, [1, 2, 3]), timeout=timeout))
        assert nodes(replies) == [1, 2, 3]
        assert [reply.content["metrics"]["node"] for reply in replies if reply.has_content()] == [1, 3]  # type: ignore[index]
        assert replies[1].error.code == 3


def test_a_client_that_stops_in_the_midst_of_its_upload_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perennial.server.run.grid.SECONDS_TO_PULL", 0.2)
    link = HostileLink([])
    link.stuck = True
    replies = list(OrderedGrid(link, poll=0).send_and_receive(map(request, [3, 1]), timeout=0.1))
    assert nodes(replies) == [3, 1]
    assert (replies[0].error.code, replies[0].error.reason) == (4, "did not answer in time")
    assert replies[1].has_content()


def test_a_superlink_that_fails_is_no_clients_fault() -> None:
    class Broken(SlowLink):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            raise grpc.RpcError

    with pytest.raises(grpc.RpcError):
        list(OrderedGrid(Broken([]), poll=0).send_and_receive([request(1)], timeout=5))


def test_who_does_not_answer_in_time_costs_the_others_nothing() -> None:
    link = SlowLink([3, 1])
    begun = time.monotonic()
    replies = list(OrderedGrid(link, poll=0.001).send_and_receive(map(request, [1, 2, 3]), timeout=0.2))
    assert 0.15 < time.monotonic() - begun < 2
    assert nodes(replies) == [1, 2, 3]
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert (replies[1].error.code, replies[1].error.reason) == (4, "did not answer in time")


def test_the_deadline_is_for_the_exchange_not_for_each_client() -> None:
    begun = time.monotonic()
    replies = list(OrderedGrid(SlowLink([]), poll=0.01).send_and_receive(map(request, range(1, 6)), timeout=0.1))
    assert time.monotonic() - begun < 0.4
    assert [reply.error.reason for reply in replies] == ["did not answer in time"] * 5


@pytest.mark.parametrize(("unsent", "failed"), [([2], [2]), ([None], [1, 2, 3])])
def test_a_request_that_cannot_be_sent_is_answered_at_once(unsent: list[int | None], failed: list[int]) -> None:
    link = SlowLink([3, 1], unsent=unsent)
    replies = list(OrderedGrid(link, poll=0).send_and_receive(map(request, [1, 2, 3]), timeout=60))
    assert nodes(replies) == [1, 2, 3]
    assert [reply.metadata.src_node_id for reply in replies if reply.has_error()] == failed
    assert {reply.error.reason for reply in replies if reply.has_error()} == {"the request could not be sent"}


class BrokenLink(SlowLink):
    """The connection breaks at pull number `at`. All requests of the first push are lost but that of node 1."""

    def __init__(self, at: int) -> None:
        super().__init__([])
        self.at, self.pushes = at, 0
        self._retry_invoker = make_simple_grpc_retry_invoker()

    def id_of(self, node: int) -> str:
        return f"id-{node}-{self.pushes}"

    def push_messages(self, messages: Iterable[Message]) -> list[Any]:
        self.pushes += 1
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ids = list(message_ids)
        self.pulls.append(ids)
        if len(self.pulls) == self.at:
            self.breaks()
        there = [self.waiting[name] for name in ids if name == "id-1-1" or not name.endswith("-1")]
        return [self._answer(message) for message in there]

    def breaks(self) -> None:
        assert self._retry_invoker.on_backoff
        self._retry_invoker.on_backoff(RetryState(print, (), {}, 1, 0.0))


def test_who_has_not_answered_is_asked_again_when_the_connection_breaks() -> None:
    link = BrokenLink(at=2)
    replies = list(OrderedGrid(link, poll=0).send_and_receive(map(request, [1, 2, 3]), timeout=60))
    assert [reply.content["metrics"]["node"] for reply in replies] == [1, 2, 3]  # type: ignore[index]
    assert link.pulls == [["id-1-1"], ["id-2-1"], ["id-2-1", "id-2-2"], ["id-3-1", "id-3-2"]]
    assert link.pushes == 2
    assert link.waiting.keys() == {"id-1-1", "id-2-1", "id-3-1", "id-2-2", "id-3-2"}
    assert {name_of(message) for message in link.waiting.values()} == {name_of(link.waiting["id-1-1"])}
    first, second = link.waiting["id-3-1"], link.waiting["id-3-2"]
    assert first is not second
    assert first.content == second.content
    assert (second.metadata.message_type, second.metadata.group_id) == ("train", "1")
    assert [expires(m) for m in (first, second)] == pytest.approx([expires(link.waiting["id-1-1"])] * 2, abs=60)


def test_a_reply_that_comes_twice_is_given_once_and_a_late_one_to_an_earlier_exchange_never() -> None:
    class Doubling(BrokenLink):
        """Nothing comes in the first exchange; later all replies, also to it, come, each twice."""

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            self.pulls.append(list(message_ids))
            asked = [self.waiting[name] for name in self.pulls[-1] if self.pushes > 1]
            replies = [self._answer(message) for message in asked]
            return replies + [Message(Error(2, "a second answer"), reply_to=message) for message in asked]

        def _answer(self, message: Message) -> Message:
            answer = RecordDict({"metrics": MetricRecord({"answers": self.pushes})})
            return Message(answer, reply_to=message)

    grid = OrderedGrid(link := Doubling(at=0), poll=0.01)
    early = list(grid.send_and_receive(map(request, [1, 2]), timeout=0.05))
    assert [reply.error.reason for reply in early] == ["did not answer in time"] * 2
    link.pulls.clear()
    replies = list(grid.send_and_receive(map(request, [1, 2]), timeout=5))
    assert nodes(replies) == [1, 2]
    assert [reply.metadata.reply_to_message_id for reply in replies] == ["id-1-2", "id-2-2"]
    assert [reply.content["metrics"]["answers"] for reply in replies] == [2, 2]  # type: ignore[index]
    assert link.pulls == [["id-1-2"], ["id-2-2"]]


def expires(message: Message) -> float:
    return message.metadata.created_at + message.metadata.ttl


@pytest.mark.parametrize("seconds", [5.0, None])
def test_a_request_lives_until_the_deadline_and_as_long_as_its_reply_may_wait_to_be_pulled(
    seconds: float | None,
) -> None:
    grid, begun = OrderedGrid(link := SlowLink([1, 2]), poll=0), time.time()
    list(grid.send_and_receive(map(request, [1, 2]), timeout=seconds))
    for message in link.waiting.values():
        if seconds is None:
            assert message.metadata.ttl == DEFAULT_TTL
        else:
            assert expires(message) == pytest.approx(begun + 5 + 60, abs=10)


def test_after_the_deadline_nobody_is_asked_again() -> None:
    link = BrokenLink(at=1)
    replies = OrderedGrid(link, poll=0.02).send_and_receive(map(request, [2, 3]), timeout=0.01)
    assert [reply.error.reason for reply in replies] == ["did not answer in time"] * 2
    assert link.pushes == 1


def test_while_the_connection_holds_nobody_is_asked_twice_and_exchanges_have_names_of_their_own() -> None:
    grid = OrderedGrid(link := SlowLink([2, 1]), poll=0)
    list(grid.send_and_receive(map(request, [1, 2])))
    first = {name_of(message) for message in link.waiting.values()}
    list(grid.send_and_receive(map(request, [1, 2])))
    second = {name_of(message) for message in link.waiting.values()}
    assert len(first) == len(second) == len(first ^ second) - 1 == 1


def test_a_send_that_the_superlink_took_for_a_repetition_is_done_again() -> None:
    class Repeated(BrokenLink):
        def push_messages(self, messages: Iterable[Message]) -> list[Any]:
            found = super().push_messages(messages)
            if self.pushes == 1 and self.at == 0:
                self.breaks()
            if self.pushes == 1:
                raise ObjectPushError("object", 5, "session")
            return found

    replies = list(OrderedGrid(link := Repeated(at=0), poll=0).send_and_receive(map(request, [1, 2])))
    assert nodes(replies) == [1, 2]
    assert link.pushes == 2
    with pytest.raises(ObjectPushError):  # the connection had held
        list(OrderedGrid(Repeated(at=9), poll=0).send_and_receive([request(1)]))


def test_flowers_grid_tells_when_its_connection_breaks() -> None:
    """Fails when the pinned release keeps its retries elsewhere."""
    inner = GrpcGrid(token="any")
    grid = OrderedGrid(inner)
    assert not grid.broken.is_set()
    invoker = inner._retry_invoker
    assert invoker.on_backoff
    invoker.on_backoff(RetryState(print, (), {}, 1, 0.0))
    assert grid.broken.is_set()


def test_nobody_asked_nobody_answers() -> None:
    assert list(OrderedGrid(SlowLink([])).send_and_receive([])) == []


def test_the_rest_is_the_inner_grids() -> None:
    grid = OrderedGrid(SlowLink([]))
    grid.set_run("run")  # type: ignore[arg-type]
    assert grid.run == "run"
    assert grid.get_node_ids() == [1, 2]


# ---------------------------------------------------------------------- in this process


def local(clients: int, behave: Any) -> LocalGrid:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        result = behave(int(context.node_config["partition-id"]))
        return Message(RecordDict({"metrics": MetricRecord({"client": result})}), reply_to=message)

    return LocalGrid(app, clients)


def test_local_clients_run_one_by_one_as_replies_are_asked_for() -> None:
    ran: list[int] = []
    grid = local(3, lambda number: ran.append(number) or number)
    replies = grid.send_and_receive([request(n) for n in (3, 1)])
    assert ran == []
    assert nodes([next(replies)]) == [3]
    assert ran == [2]
    assert nodes(replies) == [1]
    assert grid.get_node_ids() == [1, 2, 3]


def test_an_exception_in_a_client_becomes_flowers_error_reply() -> None:
    def behave(number: int) -> int:
        if number == 0:
            raise ValueError("it's\nbroken")
        return number

    replies = list(local(2, behave).send_and_receive([request(1), request(2)]))
    assert replies[0].error.code == 2
    assert replies[0].error.reason == "<class 'ValueError'>:<\"it's\\nbroken\">"
    assert nodes(replies) == [1, 2]
    assert replies[1].has_content()


def test_an_exception_in_a_client_shows_its_traceback_once(capsys: pytest.CaptureFixture[str]) -> None:
    def behave(number: int) -> int:
        raise ValueError(f"number {number}")

    grid = local(3, behave)
    for _ in range(2):
        assert all(reply.has_error() for reply in grid.send_and_receive(map(request, (1, 2, 3))))
    said = capsys.readouterr().err
    assert said.count("Traceback (most recent call last)") == said.count("in behave") == 1
    assert said.count("ValueError: number 0") == 1


@pytest.mark.parametrize("error", [UserError("no such folder"), KeyboardInterrupt()])
def test_what_is_the_users_own_ends_the_run(error: BaseException) -> None:
    def behave(_: int) -> int:
        raise error

    with pytest.raises(type(error)):
        list(local(1, behave).send_and_receive([request(1)]))
