"""Which node is which client."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from perennial.common.utils.errors import printable
from perennial.common.wire import CLIENT, FROZEN, INSISTS, LONGEST_NAME, NUM_EXAMPLES, REFUSED
from perennial.strategies.exchange import AcceptedReply, Exchange
from perennial.strategies.screening import LONGEST_REASON, Rejected

LONGEST_PAUSE = 8
"""Rounds after which a node that does not answer is asked again, at most."""

Ask = Callable[[list[int], bool], Mapping[int, "Claim"]]
"""Nodes, and whether all of them have not answered before, to what they say."""


@runtime_checkable
class Seated(Protocol):
    """A Grid that knows which node each client is, so that nobody else need be asked."""

    def node_of(self, client: int) -> int:
        """The node that is client number `client`."""
        ...


@dataclass(frozen=True)
class Claim:
    """What a node says of itself: which client it is, why it cannot take part, its training samples."""

    client: str
    refusal: str = ""
    examples: int = 0
    silent: bool = False
    """It has not said anything yet."""
    insists: str = ""
    """The protection without which it takes part in no run."""
    frozen: str = ""
    """The digest of the part of its model that no training changes."""

    def fits(self, frozen: str) -> "Claim":
        """The claim, refused where its frozen part is another one than the run's."""
        if self.refusal or not self.client or self.frozen == frozen:
            return self
        reason = (
            f"its model has other frozen weights than the run's (SHA-256 {self.frozen[:12] or 'of none'}, and the "
            f"run has {frozen[:12] or 'none'}); give it the same weights and the same version of the model's code"
        )
        return replace(self, refusal=reason)


class Roster:
    """The clients that are there, and the nodes that take no part.

    `bound` names the node that alone can be a client.
    """

    def __init__(self, clients: Iterable[str], bound: Mapping[str, int]) -> None:
        self.nodes: dict[str, int] = {}
        """Node id by client id, in the order of client ids."""
        self.refused: dict[str, str] = {}
        """Why nodes that are there take no part, by client id or as `node 123`."""
        self.declined: set[str] = set()
        """Of them the clients that are there and say themselves that they take no part."""
        self.numbers = {client: number for number, client in enumerate(clients)}
        """The number of each client by its id."""
        self._bound = bound
        self._claims: dict[int, Claim] = {}
        """What the nodes that are there say of themselves, by node id; nothing, if they did not answer."""
        self._holders: dict[str, list[int]] = {}
        """Nodes that have been a client in this run, the first one first, by client id."""
        self._silent: dict[int, tuple[int, int]] = {}
        """Of nodes that did not answer, the round in which they are asked again, and how far off it was."""
        self.round = 0
        """The round that is at work; none before the first."""

    def enrol(self, present: Iterable[int], ask: Ask) -> None:
        """`ask` those of the nodes that have not said yet which client they are; forget nodes that are gone.

        Who did not answer is asked again one round later, then after 2, 4 and 8 rounds, and every 8 from then on;
        before the first round, every time.

        Of several nodes that say they are the same client, the one that was it first in this run is. When none
        was, none is until only one is left. A client that is bound to a node can be no other.
        """
        nodes, before = set(present), len(self._claims)
        self._silent = {node: known for node, known in self._silent.items() if node in nodes}
        due = {node for node, (again, _) in self._silent.items() if not self.round or self.round >= again}
        staying = nodes - due
        self._claims = {node: claim for node, claim in self._claims.items() if node in staying}
        strangers = sorted(nodes - self._claims.keys())
        if strangers:
            found = ask(strangers, bool(self.round) and due.issuperset(strangers))
            self._claims |= found
            for node, claim in found.items():
                _, pause = self._silent.pop(node, (0, 0))
                if claim.silent:
                    pause = min(2 * pause, LONGEST_PAUSE) if self.round and pause else 1
                    self._silent[node] = self.round + pause, pause
        if strangers or len(self._claims) < before:
            self._seat()

    def admit(self, nodes: Iterable[int], ask: Ask) -> None:
        """As `enrol`, for these nodes alone; whoever else is there stays there."""
        self.enrol({*nodes, *self._claims}, ask)

    def examples(self, node: int) -> int | None:
        """The samples that a node said it has; none if it has not said."""
        claim = self._claims.get(node)
        return claim.examples if claim else None

    @property
    def insists(self) -> dict[str, str]:
        """On what protection the clients that are there insist, of those that do."""
        found = {client: self._claims[node].insists for client, node in self.nodes.items() if node in self._claims}
        return {client: insists for client, insists in found.items() if insists}

    def _seat(self) -> None:
        """Who is which client, into `nodes`, `refused` and `declined`."""
        claimants: dict[str, list[int]] = {}
        self.nodes, self.refused, self.declined = {}, {}, set()
        for node, claim in sorted(self._claims.items()):
            owner = self._bound.get(claim.client, node)
            if claim.client not in self.numbers:
                reason = claim.refusal or f"says that it is {claim.client!r}, which is none of this run's clients"
                self.refused[f"node {node}"] = str(Rejected(reason))
            elif node != owner:
                self.refused[f"node {node}"] = f"says that it is {claim.client}, which only node {owner} may be"
            else:
                claimants.setdefault(claim.client, []).append(node)
        for client, nodes in sorted(claimants.items()):
            able = [node for node in nodes if not self._claims[node].refusal]
            holders = self._holders.setdefault(client, [])
            if len(able) == 1 and able[0] not in holders:
                holders += able
            holder = next((node for node in holders if node in able), None)
            if holder is not None:
                self.nodes[client] = holder
                others = [f"node {node}" for node in able if node != holder]
                self.refused |= dict.fromkeys(others, f"says that it is {client}, which node {holder} is")
            elif able:
                who = " and ".join(f"node {node}" for node in able)
                self.refused[client] = f"{who} say that they are {client}; the setting nodes can tell which one is"
            else:
                self.refused[client] = str(Rejected(self._claims[nodes[0]].refusal))
                self.declined.add(client)


def claims(exchange: Exchange, replies: Iterable[AcceptedReply]) -> dict[int, Claim]:
    """What the nodes of an exchange say of themselves, and why the others said nothing."""
    nodes = {name: node for node, name in exchange.clients.items()}
    found = {}
    for reply in replies:
        client, refusal = (reply.settings.get(key, "") for key in (CLIENT, REFUSED))
        if isinstance(client, str) and isinstance(refusal, str):
            count = reply.num_examples if NUM_EXAMPLES in reply.metrics else 0
            if refusal:  # which may be all blanks
                refusal = printable(refusal[: 2 * LONGEST_REASON]).strip() or "takes no part and gives no reason"
            insists = printable(str(reply.settings.get(INSISTS, ""))[:LONGEST_NAME]).strip()
            frozen = printable(str(reply.settings.get(FROZEN, ""))[:LONGEST_NAME])
            found[nodes[reply.client]] = Claim(
                client[:LONGEST_NAME], refusal, count, insists=insists, frozen=frozen
            )
        else:
            found[nodes[reply.client]] = Claim("", "does not say in words which client it is")
    for name, reason in exchange.left_out.items():
        found[nodes[name]] = Claim("", reason, silent=name in exchange.silent)
    return found
