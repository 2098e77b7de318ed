"""Secure aggregation in place of a method's own mean: the server sees masked updates and their sum alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import WARNING
from math import ceil
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from perennial.common.config import RunConfig
from perennial.common.flower.names import log
from perennial.common.flower.secret_sharing import combine_shares
from perennial.common.privacy.mechanisms import SecureAggregation
from perennial.common.privacy.secure_aggregation import (
    ADVERTISE,
    COLLUDERS,
    DROPPED,
    KEY_BYTES,
    KEYS,
    MASKED,
    SEALED_BYTES,
    SHARE,
    SHARE_BYTES,
    SHARES,
    STEPS,
    SURVIVORS,
    TERMS,
    THRESHOLD,
    UNMASK,
    Summand,
    Words,
    as_bytes,
    as_tensor,
    mask,
    means_of_sum,
    pair_mask,
    public,
    shared_key,
    summands,
)
from perennial.common.selection import SPLIT, SUMS, place_of, split_off
from perennial.common.utils.errors import RunStopped, some_of
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import NUM_EXAMPLES, Scalar
from perennial.strategies.evaluation import Evaluation
from perennial.strategies.exchange import AcceptedReply, MetricMeans, Payload, PerClient
from perennial.strategies.privacy.sums import SummingStrategy
from perennial.strategies.screening import Rejected, Template

COUNTED = "counted"
"""In a checkpoint: whose counts were summed for `split`."""


class SecureStrategy(SummingStrategy):
    """`w ← w + Σ_u w_u q_u / Σ_u w_u` over the clients whose vectors arrived, q_u their quantised updates, for
    each record of the method's `sums`; of those that only some have, w_u is 0 for the others.

    It stands before a method's own class (`strategies.registry`). Each exchange becomes four: public keys, shares
    of secrets, masked vectors, shares that take off the masks (Bonawitz et al. 2017, Figure 4).
    """

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        assert isinstance(run.privacy, SecureAggregation)
        self.privacy = run.privacy
        self.counted: list[str] = []
        """The clients of the first sum of counts for `split`. The counts stay the same, so the difference of two
        sums over other clients would tell those of a single one."""

    def state_dict(self) -> dict[str, Tensors]:
        """The method's, and whose counts were summed."""
        own = {COUNTED: {COUNTED: as_tensor("\n".join(self.counted).encode())}} if self.counted else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        super().load_state_dict({name: tensors for name, tensors in state.items() if name != COUNTED})
        if COUNTED in state:
            self.counted = as_bytes(state[COUNTED][COUNTED]).decode().split("\n")

    def averaged(
        self,
        grid: Grid,
        server_round: int,
        cohort: Sequence[str],
        action: str,
        payload: Payload,
        expect: Payload,
        weight: Callable[[AcceptedReply], float],
    ) -> dict[str, Tensors]:
        parts = self.parts_of(action, payload, expect)
        messages = self.masked(grid, server_round, cohort, action, payload, parts, weight)
        return self.opened(server_round, action, self.send(grid, messages))

    def ask(self, server_round: int, cohort: list[str], grid: Grid) -> Sequence[Message]:
        """Keys, then shares, then the requests to train; the shares go on to those that they are sealed for."""
        payload, parts = self.training()
        own = self.settings(server_round)
        return self.masked(grid, server_round, cohort, "train", payload, parts, self.weight, settings=own)

    def collected(self, server_round: int, replies: Iterable[Message]) -> tuple[dict[str, Tensors], MetricRecord]:
        metrics = MetricMeans()
        return self.opened(server_round, "train", replies, metrics.add), metrics.result()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As without masks; where clients count for `split`, keys and shares come first."""
        clients, payload, settings = self.evaluation_request(arrays, grid)
        if not self.references:
            return self.messages(server_round, clients, "evaluate", payload, settings=settings)
        record, _ = split_off({}, self.hparams.evaluates, place_of(self.run.scenario))
        parts = summands(SUMS, "evaluate", record, {})
        return self.masked(
            grid, server_round, clients, "evaluate", payload, parts, lambda _: 1.0, float(STEPS), settings
        )

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        if not self.references:
            return super().aggregate_evaluate(server_round, replies)
        found = Evaluation(self.run, server_round, self.references, masked=True)
        total = self.received(server_round, "evaluate", replies, found.add)
        self.counted = self.counted or sorted(self.survivors)
        if self.counted != sorted(self.survivors):
            log(
                WARNING,
                "perennial: round %d: other clients answer than before, so nothing is counted for split",
                server_round,
            )
            return self.evaluated(found)
        means = self.unmasked(server_round, total)[SPLIT]
        counts = {name: (mean * len(self.survivors)).round().long().numpy() for name, mean in means.items()}
        try:
            found.take_sums(counts, len(self.survivors))
        except ValueError as error:
            raise self.not_kept(server_round, str(error)) from None
        return self.evaluated(found)

    def masked(
        self,
        grid: Grid,
        server_round: int,
        cohort: Sequence[str],
        action: str,
        payload: Payload | PerClient,
        parts: Sequence[Summand],
        weight: Callable[[AcceptedReply], float],
        limit: float = 0.0,
        settings: Mapping[str, Scalar] | None = None,
    ) -> Sequence[Message]:
        """The requests of an exchange whose answers are masked vectors, after those that agree on the masks.

        Numbers are within ± `limit`, by default `privacy.range`.
        """
        self.grid, self.parts, self.limit = grid, parts, limit or self.privacy.range
        share = ceil(round(max(self.privacy.threshold, self.run.quorum) * len(cohort), 9))
        self.threshold = max(share, self.privacy.colluders + 2)
        expect = {client: {KEYS: {client: torch.zeros(2 * KEY_BYTES, dtype=torch.uint8)}} for client in cohort}
        answers = self.stage(server_round, cohort, ADVERTISE, {}, expect, check=_check_keys)
        answers = self._without_twins(server_round, answers)
        self.public_keys: Tensors = {client: reply[KEYS][client] for client, reply in answers.items()}

        sealed = {client: torch.zeros(SEALED_BYTES, dtype=torch.uint8) for client in answers}
        expect = {client: {SHARES: _without(sealed, client)} for client in answers}
        agreement = {THRESHOLD: self.threshold, COLLUDERS: self.privacy.colluders}
        answers = self.stage(server_round, list(answers), SHARE, {KEYS: self.public_keys}, expect, agreement)

        self.weights = {client: self._weight(client, weight) for client in answers}
        most = torch.tensor(self.limit, dtype=torch.float64)

        def request(client: str) -> Payload:
            shares = {sender: reply[SHARES][client] for sender, reply in answers.items() if sender != client}
            terms = {"weight": torch.tensor(self.weights[client]), "range": most}
            return {**(payload(client) if callable(payload) else payload), SHARES: shares, TERMS: terms}

        size = sum(part.size for part in self.parts)
        vector = {MASKED: {MASKED: torch.zeros(8 * size, dtype=torch.uint8)}}
        return self.messages(server_round, list(answers), action, request, expect=vector, settings=settings)

    def opened(
        self,
        server_round: int,
        action: str,
        replies: Iterable[Message],
        take: Callable[[AcceptedReply], object] = lambda _: None,
    ) -> dict[str, Tensors]:
        """The means of each record, of the sum of masked vectors. `take` is given what comes in the clear beside
        them, and raises `Rejected` as a check does."""
        return self.unmasked(server_round, self.received(server_round, action, replies, take))

    def received(
        self,
        server_round: int,
        action: str,
        replies: Iterable[Message],
        take: Callable[[AcceptedReply], object] = lambda _: None,
    ) -> Words:
        """The sum of the `survivors`' masked vectors."""
        total, survivors = np.zeros(1, dtype=np.uint64), list[str]()
        for reply in self.accepted(replies, quorum=0.0, check=take):
            total = total + np.frombuffer(as_bytes(reply[MASKED][MASKED]), dtype=np.uint64)
            survivors.append(reply.client)
        self._enough(server_round, action, survivors)
        self.survivors = survivors
        return total

    def unmasked(self, server_round: int, total: Words) -> dict[str, Tensors]:
        """The means of each record, of the sum of the `survivors`' masked vectors. Raises `RunStopped`."""
        weight = sum(self.weights[client] for client in self.survivors)
        try:
            total = total - self.masks(server_round, self.survivors, len(total))
            return means_of_sum(total, self.parts, weight, self.limit)
        except ValueError as error:
            raise self.not_kept(server_round, str(error)) from None

    def not_kept(self, server_round: int, wrong: str) -> RunStopped:
        """What stops a run whose sums cannot be."""
        return RunStopped(
            f"round {server_round}: the sum under secure aggregation cannot be used ({wrong}); a client did not "
            "keep to the protocol, and which one cannot be seen"
        )

    def masks(self, server_round: int, survivors: list[str], size: int) -> Words:
        """All masks in the sum of the survivors' vectors, from the shares that they now give of their secrets.

        Raises `ValueError` where the shares of a secret do not fit together.
        """
        dropped = [client for client in self.weights if client not in survivors]
        share = {client: torch.zeros(SHARE_BYTES, dtype=torch.uint8) for client in self.weights}
        settings = {SURVIVORS: survivors, DROPPED: dropped}
        expect = {client: {SHARES: share} for client in survivors}
        answers = self.stage(server_round, survivors, UNMASK, {}, expect, settings)

        def secret(client: str) -> bytes:
            shares = [as_bytes(reply[SHARES][client]) for reply in answers.values()]
            return combine_shares(shares[: self.threshold])

        found = np.zeros(size, dtype=np.uint64)
        for client in survivors:
            found += mask(secret(client), size)
        for client in dropped:
            key = secret(client)
            if public(key) != self._masking_key(client):
                raise ValueError(f"the shares of the key of {client} are wrong")
            for other in survivors:
                found += pair_mask(key, self._masking_key(other), other, client, size)
        return found

    def stage(
        self,
        server_round: int,
        clients: Sequence[str],
        action: str,
        payload: Payload,
        expect: Mapping[str, Mapping[str, Template]],
        settings: Mapping[str, Any] | None = None,
        check: Callable[[AcceptedReply], object] = lambda _: None,
    ) -> dict[str, AcceptedReply]:
        """An exchange to which at least the threshold must answer. Raises `RunStopped`."""
        messages = self.messages(
            server_round, clients, action, payload, expect=lambda client: expect[client], settings=settings
        )
        replies = self.send(self.grid, messages)
        answers = {reply.client: reply for reply in self.accepted(replies, quorum=0.0, check=check)}
        self._enough(server_round, action, answers)
        return answers

    # ------------------------------------------------------------------ inside

    def _enough(self, server_round: int, action: str, answered: Iterable[str]) -> None:
        if (count := len(list(answered))) < self.threshold:
            left_out = sorted(self.exchanges[-1].left_out.items())
            reasons = some_of([f"{client}: {reason}" for client, reason in left_out])
            raise RunStopped(
                f"round {server_round}: secure aggregation needs {self.threshold} clients to the end, and {count} "
                f"gave a usable answer to {action!r} ({reasons})"
            )

    def _without_twins(self, server_round: int, answers: Mapping[str, AcceptedReply]) -> dict[str, AcceptedReply]:
        """Those whose public keys nobody else shows. Raises `RunStopped` below the threshold.

        The keys of a round are random and new, so who shows another's has agreed on it; the honest would refuse
        the whole list.
        """
        keys = {client: set(_halves(reply)) for client, reply in answers.items()}
        twins = {client: [o for o in keys if o != client and keys[o] & keys[client]] for client in keys}
        self.exchanges[-1].left_out |= {
            client: f"shows a public key that {' and '.join(others[:3])} shows, too"
            for client, others in twins.items()
            if others
        }
        alone = {client: reply for client, reply in answers.items() if not twins[client]}
        self._enough(server_round, ADVERTISE, alone)
        return alone

    def _masking_key(self, client: str) -> bytes:
        return as_bytes(self.public_keys[client])[KEY_BYTES:]

    def _weight(self, client: str, weight: Callable[[AcceptedReply], float]) -> int:
        """What the method weighs the client with, by the samples that it had when it enrolled."""
        samples = MetricRecord({NUM_EXAMPLES: self.roster.examples(self.roster.nodes[client]) or 0})
        return round(weight(AcceptedReply(client, {}, samples, ConfigRecord())))


def _check_keys(reply: AcceptedReply) -> None:
    """Raises `Rejected` for public keys that agree with nobody's, on which all others would fail."""
    try:
        for key in _halves(reply):
            shared_key(bytes(KEY_BYTES), key, "check")
    except ValueError:
        raise Rejected("its public keys are none") from None


def _halves(reply: AcceptedReply) -> tuple[bytes, bytes]:
    """A client's public keys, for sealing and for masking."""
    keys = as_bytes(reply[KEYS][reply.client])
    return keys[:KEY_BYTES], keys[KEY_BYTES:]


def _without(tensors: Tensors, client: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != client}
