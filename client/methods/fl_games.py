"""FL Games, client half: steps of one's own predictor against all others', a gradient for what all share."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from client.trainer import EVALUATION_BATCH, LocalTrainer, Metrics, Predictor, Received, Reply
from client.working import Working
from common.adam import Adam
from common.data.examples import Examples
from common.methods.fl_games import ANSWERED, PLAYED, PLAYERS, PREDICTOR, FLGames, VFLGames
from common.models import Tensors, joined
from common.wire import GRADIENT, MODEL, NUM_EXAMPLES

ADAM = "adam"
ENSEMBLE = "ensemble"


class FLGamesClient(LocalTrainer[FLGames]):
    """Player k of m, whose action is its predictor w^k: `z ↦ w^k(z)` on the representation `z = φ(x)`.

    It keeps w^k, Adam's moments, the last `buffer` actions of each opponent that it has met, and the ensemble of
    the last evaluation (Gupta et al. 2022, Algorithm 1).
    """

    def train(self, received: Received) -> Reply:
        """PredictorUpdate (l. 2-6): `w^k ← w^k − η ∇R^k` on `loss`, a mini-batch at a time."""
        self._remember(received)
        own, adam = self.own(), Adam(self.kept.get(ADAM))
        trained, metrics = self.descend(
            own,
            self.loss,
            received,
            names=[name for name in self.network.parameter_names if name in own],
            direction=adam.direction if self.hparams.optimizer == "adam" else None,
        )
        self.kept[PREDICTOR], self.kept[ADAM] = trained, adam.state()
        return Reply({PREDICTOR: trained}, {NUM_EXAMPLES: len(self.data.train), **metrics})

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
        risk = F.cross_entropy((own + answered) / divisor, batch.y)
        ensemble = own.detach() + _sum(current.values())
        return risk, {"risk": risk, "accuracy": (ensemble.argmax(dim=1) == batch.y).float().mean()}

    def train_gradient(self, received: Received) -> Reply:
        """RepresentationUpdate (l. 7-11): `g^k = ∇_φ R^k(w^av ∘ φ)`, without the past of equation 5."""
        phi, own = Working(received[MODEL], self.network.featurizer_names), self.own()
        total = [torch.zeros_like(value) for value in phi.values]
        count, loss, correct = 0, 0.0, 0
        for batch in self._representation_data(received.round):
            z = self.network.features(phi.tensors, batch.x)
            outputs = [self.play(own, z), *(self.play(received[name], z) for name in _predictors(received))]
            logits = _sum(outputs) / len(_played(received))
            risk = F.cross_entropy(logits, batch.y, reduction="sum")
            torch._foreach_add_(total, phi.gradient(risk))
            count, loss = count + len(batch), loss + float(risk.detach())
            correct += int((logits.argmax(dim=1) == batch.y).sum())
        torch._foreach_div_(total, count)
        return Reply(
            {GRADIENT: dict(zip(self.network.featurizer_names, total, strict=True))},
            {NUM_EXAMPLES: len(self.data.train), "risk": loss / count, "accuracy": correct / count},
        )

    def evaluate(self, received: Received) -> Reply:
        """The ensemble that is evaluated is what stays with the client."""
        self.kept[ENSEMBLE] = joined(received.arrays)
        return super().evaluate(received)

    def models(self, received: Received) -> dict[str, Predictor]:
        """`w^av ∘ φ`, the mean of all players' outputs."""
        players = _predictors(received)  # here all of them

        def ensemble(x: Tensor) -> Tensor:
            z = self.represent(received, x)
            return _sum(self.play(received[name], z) for name in players) / len(players)

        return {ENSEMBLE: ensemble}

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
