"""Which node is which client, when several say that they are the same one, or are nobody's."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from scripted_clients import content

from perennial.common.config import load_config
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.wire import CLIENT, CONFIG, METRICS, MODEL, NUM_EXAMPLES, REFUSED, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, Exchange
from perennial.strategies.roster import Roster, claims
from perennial.testing.tiny_federation import SpoilingGrid, toy_config

NAMES = toy_config("fedavg").scenario.client_ids


@dataclass
class Nodes(Grid):
    """Nodes that say which client they are and how many samples they have; a client's model is its node id."""

    claims: dict[int, str] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    """Samples by node id when it trains; at its enrolment every node says 10."""

    def get_node_ids(self) -> list[int]:
        return list(self.claims)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [Message(self.answer(message), reply_to=message) for message in messages]

    def answer(self, message: Message) -> RecordDict:
        node = message.metadata.dst_node_id
        if message.metadata.message_type == "query":
            who = ConfigRecord({CLIENT: self.claims[node]})
            return RecordDict({CONFIG: who, METRICS: MetricRecord({NUM_EXAMPLES: 10})})
        return content({MODEL: {"w": torch.full((2,), float(node))}}, self.counts.get(node, 10))

    def _absent(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    set_run = create_message = push_messages = pull_messages = _absent
    run = property(_absent)


def server(*settings: str) -> MethodStrategy[Any]:
    return MethodStrategy(toy_config("fedavg", "quorum=0", *settings), "run-1")


def train(method: MethodStrategy[Any], grid: Nodes) -> tuple[float | None, dict[str, str]]:
    """The mean of the models that were used, and who was left out of the round."""
    start = to_record({"w": torch.zeros(2)})
    requests = method.configure_train(1, start, ConfigRecord(), grid)
    arrays, _ = method.aggregate_train(1, grid.send_and_receive(requests))
    left_out = {client: why for client, why in method.exchanges[-1].left_out.items() if why != "is not connected"}
    return (float(arrays["w"].numpy()[0]) if arrays else None), left_out


def test_the_node_that_had_a_client_id_first_keeps_it_and_the_other_is_named() -> None:
    method, grid = server(), Nodes({7: NAMES[0]})
    method.enrol(grid)
    grid.claims[3] = NAMES[0]
    assert train(method, grid) == (7, {})
    assert method.roster.refused == {"node 3": f"says that it is {NAMES[0]}, which node 7 is"}


def test_a_site_that_comes_back_as_another_node_has_its_place_once_the_old_node_is_gone() -> None:
    """Without node authentication, a restarted SuperNode has a new id, and the old one is there for a minute."""
    method, grid = server(), Nodes({7: NAMES[0]})
    method.enrol(grid)
    grid.claims[8] = NAMES[0]
    assert train(method, grid)[0] == 7
    del grid.claims[7]
    assert train(method, grid) == (8, {})
    assert method.roster.refused == {}
    grid.claims[7] = NAMES[0]  # with authentication it has its id back, and was the client before node 8
    assert train(method, grid)[0] == 7
    assert method.roster.refused == {"node 8": f"says that it is {NAMES[0]}, which node 7 is"}


def test_of_two_that_come_together_neither_is_used_until_one_is_gone() -> None:
    method, grid = server(), Nodes({7: NAMES[0], 3: NAMES[0], 5: NAMES[1]})
    why = f"node 3 and node 7 say that they are {NAMES[0]}; the setting nodes can tell which one is"
    for _ in range(2):
        assert train(method, grid) == (5, {NAMES[0]: why})
        assert method.roster.refused == {NAMES[0]: why}
    del grid.claims[3]
    assert train(method, grid) == (6, {})
    assert method.roster.refused == {}


def test_a_client_that_is_bound_to_a_node_can_be_no_other() -> None:
    bound = f"nodes={{{NAMES[0]} = 7}}"
    assert train(server(bound), Nodes({3: NAMES[0]})) == (3, {}), "the nodes of a rehearsal have other numbers"
    method, grid = server(bound, "runtime=deployment"), Nodes({3: NAMES[0]})
    assert train(method, grid) == (None, {})
    assert method.roster.refused == {"node 3": f"says that it is {NAMES[0]}, which only node 7 may be"}
    grid.claims[7] = NAMES[0]
    assert train(method, grid) == (7, {})
    assert method.roster.refused.keys() == {"node 3"}


def test_a_binding_names_clients_of_the_scenario_and_whole_numbers() -> None:
    for setting, word in (
        ("nodes={client-9 = 7}", "nodes: unknown client 'client-9'"),
        ("nodes={client-0 = 'me'}", "nodes.client-0: 'me' is not possible"),
    ):
        with pytest.raises(UserError, match=word):
            toy_config("fedavg", setting)
    big = 2**64 - 1  # Flower's node ids have 64 bits, TOML's integers 63
    config = toy_config("fedavg", f'nodes={{client-0 = "{big}"}}')
    assert config.nodes == {"client-0": big}
    assert load_config(options={**config.model_dump()}).nodes == config.nodes


def test_a_node_that_is_nobodys_is_named() -> None:
    method, grid = server(), Nodes({7: NAMES[0], 3: "client-99", 4: "\x1b[2J"})
    assert train(method, grid) == (7, {})
    assert method.roster.refused == {
        "node 3": "says that it is 'client-99', which is none of this run's clients",
        "node 4": r"says that it is '\x1b[2J', which is none of this run's clients",
    }


def test_a_client_cannot_count_more_samples_than_when_it_enrolled() -> None:
    method, grid = server(), Nodes({7: NAMES[0], 5: NAMES[1]}, {7: 11, 5: 9})
    word = "metric 'num-examples' is 11, and 10 when the client enrolled"
    assert train(method, grid) == (5, {NAMES[0]: word})


def test_a_client_that_says_it_has_a_billion_billion_samples_does_not_enrol() -> None:
    method, grid = server("most_examples=9"), Nodes({7: NAMES[0]})
    assert train(method, grid) == (None, {})
    assert method.roster.refused == {"node 7": "metric 'num-examples' is 10, and most_examples=9 is the limit"}


def test_who_is_refused_is_in_the_log_and_in_the_summary(tmp_path: Any) -> None:
    """Node 2 says that it is client-0, which node 1 says, too."""
    config = toy_config("fedavg", "wait=0.01", rounds=2)
    here = LocalRuntime(config)

    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 2 and request.metadata.message_type == "query":
            reply.content.config_records[CONFIG][CLIENT] = NAMES[0]
        return reply

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(tmp_path / "run", config))
    assert summary["left_out"].keys() == {NAMES[0], NAMES[1]}
    assert "node 1 and node 2 say that they are client-0" in summary["left_out"][NAMES[0]]["last"]
    assert summary["left_out"][NAMES[1]]["last"].endswith("is not connected")


@pytest.mark.parametrize("quorum", [0.5, 1.0])
def test_a_client_that_takes_no_part_is_not_waited_for(tmp_path: Any, quorum: float) -> None:
    """With the default `wait` of two minutes, in which nothing would change."""
    config = toy_config("fedavg", f"quorum={quorum}", rounds=1)
    here = LocalRuntime(config)

    def refuse(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 2 and request.metadata.message_type == "query":
            reply.content.config_records[CONFIG][REFUSED] = "its policy says no"
        return reply

    here.grid = SpoilingGrid(here.grid, refuse)  # type: ignore[assignment]
    folder = RunFolder.create(tmp_path / "run", config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perennial.server.run.loop.time.sleep", lambda seconds: pytest.fail("waited"))
        if quorum == 0.5:
            assert here.run(folder)["left_out"][NAMES[1]]["last"].endswith("its policy says no")
            return
        said = "only 3 of 4 clients take part, and quorum=1 of them is needed (client-1: its policy says no)"
        with pytest.raises(RunStopped, match=re.escape(said)):
            here.run(folder)


def test_a_refusal_without_a_word_is_said_to_be_one() -> None:
    exchange = Exchange("query", 0, {4: "node 4"}, lambda _: {})
    settings = ConfigRecord({CLIENT: NAMES[0], REFUSED: "\x1b[31m \x1b[2J"})
    reply = AcceptedReply("node 4", {}, MetricRecord(), settings)
    roster = Roster(NAMES, {})
    roster.enrol([4], lambda *_: claims(exchange, [reply]))
    assert roster.refused == {NAMES[0]: "takes no part and gives no reason"}
