"""Client-level differential privacy in place of a method's own mean: clip each update, add noise to their mean."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt

import numpy as np
import torch
from flwr.serverapp import Grid

from perennial.common.config import RunConfig
from perennial.common.privacy.mechanisms import Clipping
from perennial.common.privacy.secure_aggregation import Summand
from perennial.common.utils.tensors import Tensors, flattened, unflattened
from perennial.common.wire import numbers
from perennial.strategies.exchange import AcceptedReply, Payload
from perennial.strategies.mean import StreamingMean
from perennial.strategies.privacy.sums import SummingStrategy

STATE = "privacy"


class PrivateStrategy(SummingStrategy):
    """`w ← w + 1/m (Σ_u clip(w_u − w, C) + N(0, z² C² I))` over the m clients that answered, all of one weight.

    What the model has frozen gets no noise. The class stands before a method's own class, which sees no other mean
    (`strategies.registry`). McMahan et al. 2018, Algorithm 1; with `adaptive` Andrew et al. 2021, Algorithm 1.
    """

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        assert isinstance(run.privacy, Clipping)
        self.privacy = run.privacy
        self.norms: dict[str, float] = {}
        """C of the next round, by exchange."""
        sums = self.hparams.summed()
        released = {(each.exchange, "bounded" if each.bounded else "update") for each in sums}
        released |= {(each.exchange, "owners") for each in sums if each.weight == "owner"}
        self.mechanisms = len(released)
        """How many noised sums a round has: of each exchange the updates, who has a record, what is bounded."""
        self.entropy = np.random.default_rng()
        """From the operating system's entropy: whoever knew the run's seed, as its clients do, could subtract the
        noise."""
        self.count: Callable[[], object] = lambda: None
        """Puts one more release on disk."""
        self.counted = 0
        """The last round whose release is."""

    @property
    def clipping_norm(self) -> float:
        """C of the next round's training."""
        return self.norms.get("train", self.privacy.clipping_norm)

    def state_dict(self) -> dict[str, Tensors]:
        norms = {"train": self.clipping_norm, **self.norms}
        named = {_place(name): torch.tensor(norm, dtype=torch.float64) for name, norm in norms.items()}
        return {**super().state_dict(), STATE: named}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        norms = state.get(STATE, {})  # none where a method takes up what a round has brought
        exchanges = {each.exchange for each in self.hparams.summed()}
        self.norms |= {name: float(norms[at]) for name in exchanges if (at := _place(name)) in norms}
        super().load_state_dict({name: tensors for name, tensors in state.items() if name != STATE})

    def count_release(self, server_round: int) -> None:
        """Count this attempt at a round, once: before anything with its noise is sent."""
        if self.counted != server_round:
            self.count()
            self.counted = server_round

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
        replies = self.exchange(grid, server_round, cohort, action, payload, expect=expect)
        return self.noised(server_round, action, replies, self.parts_of(action, payload, expect))

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        _, parts = self.training()
        return self.noised(server_round, "train", replies, parts)

    def noised(
        self, server_round: int, action: str, replies: Iterable[AcceptedReply], parts: Sequence[Summand]
    ) -> dict[str, Tensors]:
        """The mean of each record over the clients, or over those that have it, with noise; all of one weight.

        A client that has k of the records that only some have counts for 1/√k in each. So the numbers of owners
        change by a vector of norm 1 when a client leaves. A record that seems to have no owner is left out.
        """
        plain, shared, bounded = (
            [part for part in parts if not part.bounded],
            [part for part in parts if part.owners],
            [part for part in parts if part.bounded],
        )
        norm = self.norms.get(action, self.privacy.clipping_norm)
        updates, votes, owners, clients, unclipped = StreamingMean(), StreamingMean(), StreamingMean(), 0, 0
        start = flattened({part.record: part.reference for part in plain})
        for reply in replies:
            own = self.hparams.terms(reply.arrays, numbers(reply.metrics))
            has = {part.record: float(part.record in own) for part in shared}
            share = {name: there / sqrt(max(1.0, sum(has.values()))) for name, there in has.items()}
            after = flattened({part.record: _shared(own, part, share) for part in plain})
            update, small = clipped(after, start, norm)
            updates.add(update)
            if shared:
                owners.add({name: torch.tensor(value, dtype=torch.float64) for name, value in share.items()})
            if bounded:
                within = flattened({part.record: own[part.record] for part in bounded})
                votes.add({name: tensor.clamp(-1, 1) for name, tensor in within.items()})
            unclipped += small
            clients += 1
        if not clients:
            return {}
        self.count_release(server_round)
        multiplier, deviation = self.privacy.noise(clients, self.mechanisms)
        each = self.privacy.noise_multiplier * sqrt(self.mechanisms)
        means = unflattened(self._with_noise(updates.result(), multiplier * norm / clients))
        counts = self._with_noise(owners.result(), each / clients) if shared else {}
        if bounded:
            most = sqrt(sum(tensor.numel() for part in bounded for tensor in part.reference.values()))
            means |= unflattened(self._with_noise(votes.result(), each * most / clients))
        found: dict[str, Tensors] = {}
        frozen = set(self.network.frozen_names)
        for part in parts:
            count = float(counts[part.record]) if part.owners else 1.0
            if count * clients > 0.5:
                found[part.record] = {
                    name: before.cpu()
                    if name in frozen
                    else (before.double().cpu() + means[part.record][name] / count).to(before.dtype)
                    for name, before in part.reference.items()
                }
        row = {"kind": "privacy", "round": server_round, "clients": clients, "clipping_norm": norm}
        self.notes.append(row if action == "train" else {**row, "exchange": action})
        share_unclipped = (unclipped + self.entropy.normal(0, deviation)) / clients
        self.norms[action] = self.privacy.followed(norm, share_unclipped)
        return found

    def _with_noise(self, tensors: Tensors, deviation: float) -> Tensors:
        """On the CPU, in float64."""
        return {
            name: tensor.double().cpu() + torch.as_tensor(self.entropy.normal(0, deviation, tuple(tensor.shape)))
            for name, tensor in tensors.items()
        }


def _shared(own: Mapping[str, Tensors], part: Summand, share: Mapping[str, float]) -> Tensors:
    """A client's record, its update scaled to the client's share in it; what was sent, where it has none."""
    if part.record not in own:
        return part.reference
    if not part.owners:
        return {name: own[part.record][name] for name in part.reference}
    return {
        name: before.double() + share[part.record] * (own[part.record][name].double() - before.double())
        for name, before in part.reference.items()
    }


def _place(exchange: str) -> str:
    """Of an exchange's clipping norm in a checkpoint."""
    return "clipping-norm" if exchange == "train" else f"clipping-norm {exchange}"


def clipped(model: Tensors, start: Tensors, norm: float) -> tuple[Tensors, bool]:
    """`Δ · min(1, C / ‖Δ‖)` of the update `Δ = model − start`, all tensors as one vector, in float64; and whether
    ‖Δ‖ ≤ C (McMahan et al. 2018, FlatClip)."""
    update = {name: tensor.double() - start[name].to(tensor.device) for name, tensor in model.items()}
    length = sqrt(sum(float(tensor.square().sum()) for tensor in update.values()))
    if length <= norm:
        return update, True
    return {name: tensor * (norm / length) for name, tensor in update.items()}, False
