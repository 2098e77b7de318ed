"""FL Games, client half: steps of one's own predictor against all others', a gradient for what all share."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from perennial.client.steps import Working
from perennial.client.trainer import (
    EVALUATION_BATCH,
    LocalTrainer,
    Metrics,
    Predictor,
    Received,
    Reply,
)
from perennial.common.data.examples import Examples
from perennial.common.mathematics.adam import Adam
from perennial.common.methods.fl_games import (
    ANSWERED,
    PLAYED,
    PLAYERS,
    PREDICTOR,
    FLGames,
    VFLGames,
    has_accuracy,
)
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors, flattened
from perennial.common.wire import GRADIENT, MODEL, NUM_EXAMPLES

ADAM = "adam"
ENSEMBLE = "ensemble"


class FLGamesClient(LocalTrainer[FLGames]):
    """Player k of m, whose action is its predictor w^k: `z ↦ w^k(z)` on the representation `z = φ(x)`.

    It keeps w^k, Adam's moments, in each of `buffer` places the newest action of each opponent that it was sent
    for it, and the ensemble of the last evaluation (Gupta et al. 2022, Algorithm 1).
    """

    def train(self, received: Received) -> Reply:
        """PredictorUpdate (l. 2-6): `w^k ← w^k − η ∇R^k` on `loss`, a mini-batch at a time."""
        self._remember(received)
        own, adam = self.own(), Adam(self.kept.get(ADAM))
        measured = self._measured(received)
        if self.client not in self.hparams.movers(received.round, list(_played(received))):
            return Reply(metrics={NUM_EXAMPLES: len(self.data.train), **measured})
        trained, metrics = self.descend(
            own,
            self.loss,
            received,
            names=[name for name in self.network.parameter_names if name in own],
            optimizer=adam if self.hparams.optimizer == "adam" else MODEL,
        )
        self.kept[PREDICTOR], self.kept[ADAM] = trained, adam.state()
        return Reply({PREDICTOR: trained}, {NUM_EXAMPLES: len(self.data.train), **metrics, **measured})

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """`R^k((w' + Σ_{q≠k} w^q) / m)` (4), or with the opponents' past as well (5); only w' has a gradient."""
        played = _played(received)
        remembered = sum(times > 0 for player, times in played.items() if player != self.client)
        with torch.no_grad():
            z = self.represent(received, batch.x)
            current = {name: self.play(received[name], z) for name in _predictors(received)}
            answered = self._answered(received, current, z)
        own = self.play(params, z, training=True)
        divisor = self.hparams.divisor(len(played), remembered if self.hparams.buffer else 0)
        risk = self.criterion((own + answered) / divisor, batch.y)
        if not has_accuracy(self.task):
            return risk, {"risk": risk}
        ensemble = own.detach() + _sum(current.values())
        return risk, {"risk": risk, "accuracy": self.task.right(ensemble, batch.y).float().mean()}

    def train_gradient(self, received: Received) -> Reply:
        """RepresentationUpdate (l. 7-11): `g^k = ∇_φ R^k(w^av ∘ φ)`, without the past of equation 5; weight decay
        is part of it."""
        phi, own = Working(received[MODEL], self.network.featurizer_names), self.own()
        total = [torch.zeros_like(value) for value in phi.values]
        count, loss, correct = 0, 0.0, 0
        for batch in self._representation_data(received.round):
            z = self.network.features(phi.tensors, batch.x)
            logits = self._sum_of_outputs(received, z, own) / len(_played(received))
            risk = self.task.loss(logits, batch.y, reduction="sum")
            torch._foreach_add_(total, phi.gradient(risk))
            count, loss = count + len(batch), loss + float(risk.detach())
            correct += int(self.task.right(logits, batch.y).sum()) if has_accuracy(self.task) else 0
        torch._foreach_div_(total, count)
        total = self.with_decay(total, phi)
        metrics = {NUM_EXAMPLES: len(self.data.train), "risk": loss / count}
        if has_accuracy(self.task):
            metrics["accuracy"] = correct / count
        if count < len(self.data.train):
            metrics |= self._measured(received)
        return Reply({GRADIENT: dict(zip(self.network.featurizer_names, total, strict=True))}, metrics)

    def evaluate(self, received: Received) -> Reply:
        """The ensemble that is evaluated is what stays with the client."""
        self.kept[ENSEMBLE] = flattened(received.arrays)
        return super().evaluate(received)

    def models(self, received: Received) -> dict[str, Predictor]:
        """`w^av ∘ φ`, the mean of all players' outputs."""
        players = len(_predictors(received))  # here all of them
        return {ENSEMBLE: lambda x: self._sum_of_outputs(received, self.represent(received, x)) / players}

    def batches(
        self, steps: int, round_: int, purpose: str = "batches", of: Examples | None = None
    ) -> Iterator[Examples]:
        """A round's mini-batches: drawn anew, or the next of shuffled passes, in which every round moves on."""
        if self.hparams.sampling == "fresh":
            yield from super().batches(steps, round_, purpose, of)
            return
        train, count = self.data.train if of is None else of, self.mini_batches(steps)
        for number in range((round_ - 1) * count, round_ * count):
            epoch, place = divmod(number, self.per_pass)
            order = torch.randperm(len(train), generator=torch_generator(self.seed, self.client, epoch, "epoch"))
            yield train[torch.split(order, self.hparams.batch_size)[place].to(train.y.device)]

    # ------------------------------------------------------------------ the parts of a model

    def own(self) -> Tensors:
        """w^k; before this client's first turn a draw of its own."""
        drawn = self.kept.get(PREDICTOR)
        return drawn or self.hparams.predictor(self.network.initial(self.seed, self.client))

    def represent(self, received: Received, x: Tensor) -> Tensor:
        """`φ(x)`; x itself in the Fixed game."""
        return self.network.features(received[MODEL], x) if self.hparams.learns else x

    def play(self, predictor: Tensors, z: Tensor, training: bool = False) -> Tensor:
        """`w(z)`, logits."""
        run = self.network.classify if self.hparams.learns else self.network.predict
        return run(predictor, z, training)

    def _sum_of_outputs(self, received: Received, z: Tensor, *own: Tensors) -> Tensor:
        """`Σ_q w^q(z)` of one's own predictor and those in the request."""
        others = (received[name] for name in _predictors(received))
        return _sum(self.play(predictor, z) for predictor in (*own, *others))

    @torch.no_grad()
    def _measured(self, received: Received) -> dict[str, float]:
        """The ensemble's accuracy on `ending_share` of the training data, the same ones in every round; nothing in
        rounds in which the game may not end."""
        if not self.hparams.measures(received.round, self.task):
            return {}
        train, own = self.data.train, self.own()
        if (count := max(1, round(self.hparams.ending_share * len(train)))) < len(train):
            order = torch.randperm(len(train), generator=torch_generator(self.seed, self.client, 0, "ending"))
            train = train[order[:count].to(train.y.device)]
        logits = self.outputs(lambda x: self._sum_of_outputs(received, self.represent(received, x), own), train.x)
        return {"accuracy": int(self.task.right(logits, train.y).sum()) / len(train)}

    # ------------------------------------------------------------------ the opponents

    def _answered(self, received: Received, current: dict[str, Tensor], z: Tensor) -> Tensor:
        """What equations 4 and 5 add to this client's own outputs, from the opponents' `current` ones."""
        if ANSWERED in received.arrays:  # summed up at the server
            return self.play(received[ANSWERED], z)
        total = torch.zeros(())
        for player, output in current.items():
            past = self._buffer(player)
            now, each = self.hparams.weights(len(past))
            # The newest of the past is the present one.
            outputs = [output if action is received[player] else self.play(action, z) for action in past]
            total = total + now * output + each * _sum(outputs)
        return total

    def _remember(self, received: Received) -> None:
        """An opponent's n-th action takes the place of the one `buffer` before it, first in first out."""
        for player, times in _played(received).items():
            if self.hparams.buffer and times and player in received.arrays:
                self.kept[f"{player}.{times % self.hparams.buffer}"] = received[player]

    def _buffer(self, player: str) -> list[Tensors]:
        places = (f"{player}.{place}" for place in range(self.hparams.buffer))
        return [self.kept[place] for place in places if place in self.kept]

    def _representation_data(self, round_: int) -> Iterable[Examples]:
        """All local data in pieces (FAST), or `local_steps` mini-batches."""
        assert isinstance(self.hparams, VFLGames)
        if not self.hparams.fast:
            return self.batches(self.hparams.local_steps, round_)
        train = self.data.train
        everything = torch.arange(len(train), device=train.y.device)
        return (train[index] for index in torch.split(everything, EVALUATION_BATCH))


def _played(received: Received) -> dict[str, int]:
    """How often each player has played."""
    players, times = received.settings[PLAYERS], received.settings[PLAYED]
    return dict(zip(players, times, strict=True))  # type: ignore[arg-type]


def _predictors(received: Received) -> list[str]:
    """The predictors in a request, or their sum in parameter space, in the order of client ids."""
    return sorted(received.arrays.keys() - {MODEL, ANSWERED})


def _sum(outputs: Iterable[Tensor]) -> Tensor:
    return sum(outputs, torch.zeros(()))
