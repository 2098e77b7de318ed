"""FL Games, server half: whose turn it is, what a player hears of the others, and when the game ends."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from perennial.common.config import RunConfig
from perennial.common.mathematics.adam import Adam
from perennial.common.methods.fl_games import (
    ANSWERED,
    OTHERS,
    PLAYED,
    PLAYERS,
    PREDICTOR,
    FLGames,
    VFLGames,
    has_accuracy,
)
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors, flattened, part, unflattened
from perennial.common.wire import GRADIENT, MODEL, Scalar, to_record
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, MetricMeans, Payload, PerClient
from perennial.strategies.mean import StreamingMean
from perennial.strategies.methods.fedrep import split_network
from perennial.strategies.screening import Rejected

WINDOW = 50


class FLGamesStrategy(MethodStrategy[FLGames]):
    """A round is a step of the representation φ (Variable game) or of predictors (Algorithm 1), as `movers` says.

    The global arrays are the ensemble, φ and every player's predictor, as `RECORD/TENSOR`. Once the game has ended
    nobody is asked any more, so the ensemble of that moment is the one that is evaluated from then on.
    """

    def __init__(self, run: RunConfig, run_id: str) -> None:
        """Raises `UserError` where predictors that are not linear would be summed in parameter space, and for a
        model whose featurizer has nothing to be learned."""
        super().__init__(run, run_id)
        if self.hparams.learns:
            split_network(run)
        self.players, self.task = run.scenario.client_ids, run.predicts
        names = self.hparams.predictor(self.network.initial(run.seed)).keys()
        if self.hparams.space == "parameter" and names != {"classifier.weight", "classifier.bias"}:
            raise UserError(
                "method.space: 'parameter' is for linear predictors, whose summed outputs are those of the summed "
                f"parameters; model {run.model.name!r} gives {self.hparams.name} others, so take 'function'"
            )
        self.ensemble: dict[str, Tensors] = {}
        """φ as `model`, and each player's present action by its client id."""
        self.played = dict.fromkeys(self.players, 0)
        self.past: dict[str, Tensors] = {}
        """In parameter space: each player's buffer as `CLIENT.PLACE`, and its running sum as `CLIENT.sum`."""
        self.adam = Adam()
        self.curve: list[float] = []
        """The ensemble's accuracy on training data, by round, over those who answered."""
        self.ended = 0

    def state_dict(self) -> dict[str, Tensors]:
        game = {
            PLAYED: torch.tensor(list(self.played.values())),
            "curve": torch.tensor(self.curve, dtype=torch.float64),
            "ended": torch.tensor(self.ended),
        }
        return {"game": game, "adam": self.adam.state(), **self.past}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        rest = dict(state)
        game = rest.pop("game")
        self.played = dict(zip(self.players, game[PLAYED].tolist(), strict=True))
        self.curve, self.ended = game["curve"].tolist(), int(game["ended"])
        self.adam, self.past = Adam(rest.pop("adam", None)), rest

    def payload(self, model: Tensors) -> Payload:
        return unflattened(model)

    # ------------------------------------------------------------------ a round

    def ask(self, server_round: int, cohort: list[str], grid: Grid) -> Sequence[Message]:
        """Ask all for their gradients of φ, or all (parallel) or the next one (sequential) to play.

        Where the accuracy of the ensemble is measured, so is everybody else, who then does nothing but that.
        """
        self.ensemble = dict(self.payload(self.sent)) if server_round > 1 else self._opening(self.sent)
        if self.ended:
            return []
        settings: dict[str, Scalar] = {PLAYERS: list(self.players), PLAYED: list(self.played.values())}
        if not (movers := self.hparams.movers(server_round, self.players)):
            phi = self.ensemble[MODEL]
            expected = {GRADIENT: {name: phi[name] for name in self.network.featurizer_names}}
            heard = self._heard(past=False)
            return self.messages(server_round, cohort, "train.gradient", heard, expect=expected, settings=settings)
        if self.hparams.order == "sequential":
            cohort = list({*cohort, *movers} if self.hparams.measures(server_round, self.task) else movers)
            self.enrol(grid, cohort)
        return self.messages(
            server_round,
            cohort,
            "train",
            self._heard(past=True),
            expect=lambda client: {PREDICTOR: self.ensemble[client]} if client in movers else {},
            settings=settings,
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """All new actions take effect at once; a player that is missing keeps its last one."""
        if self.ended:
            return None, None
        gradient, actions, metrics = StreamingMean(), {}, MetricMeans()
        in_turn = self.hparams.order == "sequential" and self.hparams.movers(server_round, self.players)
        # Where one client plays, its failure costs it a turn and not everybody the run.
        check = _says_accuracy if has_accuracy(self.task) else self.check
        for reply in self.accepted(replies, quorum=0.0 if in_turn else None, check=check):
            metrics.add(reply)
            if PREDICTOR in reply.arrays:
                actions[reply.client] = reply[PREDICTOR]
            if GRADIENT in reply.arrays:
                gradient.add(reply[GRADIENT], reply.num_examples)
        means = metrics.result()
        if has_accuracy(self.task) and "accuracy" in means:
            self._follow(server_round, float(means["accuracy"]))  # type: ignore[arg-type]
        if not self.ended:
            for client, action in actions.items():
                self._play(client, action)
            if gradient.weight:
                self._represent(gradient.result())
        return to_record(flattened(self.ensemble)), means

    # ------------------------------------------------------------------ inside

    def _opening(self, initial: Tensors) -> dict[str, Tensors]:
        """The common initial φ, and predictors that each player draws for itself."""
        phi = {MODEL: part(initial, "featurizer")} if self.hparams.learns else {}
        seed, predictor = self.run.seed, self.hparams.predictor
        return {**phi, **{player: predictor(self.network.initial(seed, player)) for player in self.players}}

    def _heard(self, past: bool) -> PerClient:
        """φ and a client's opponents: all their predictors, or in parameter space their sum, and that with the
        past of equation 5 where it is wanted."""

        def heard(client: str) -> Payload:
            phi = {MODEL: self.ensemble[MODEL]} if self.hparams.learns else {}
            opponents = [player for player in self.players if player != client]
            if self.hparams.space == "function":
                return phi | {player: self.ensemble[player] for player in opponents}
            like = self.ensemble[client]
            sums = {OTHERS: _combined([(1.0, self.ensemble[player]) for player in opponents], like)}
            if past and self.hparams.buffer:
                terms = [term for player in opponents for term in self._terms(player)]
                sums[ANSWERED] = _combined(terms, like)
            return phi | sums

        return heard

    def _terms(self, player: str) -> list[tuple[float, Tensors]]:
        """What an opponent of `player` answers to, with weights; the buffer as its running sum."""
        now, each = self.hparams.weights(min(self.played[player], self.hparams.buffer))
        past = [(each, self.past[f"{player}.sum"])] if each else []
        return [(now, self.ensemble[player]), *past]

    def _play(self, player: str, action: Tensors) -> None:
        """An action takes effect; the buffer's sum takes it in and lets the oldest go (§4.1's prefix sum)."""
        self.ensemble[player] = action
        self.played[player] += 1
        if self.hparams.space == "parameter" and self.hparams.buffer:
            total, place = f"{player}.sum", f"{player}.{self.played[player] % self.hparams.buffer}"
            changes = [(1.0, action)]
            changes += [(1.0, self.past[total])] if total in self.past else []
            changes += [(-1.0, self.past[place])] if place in self.past else []
            self.past[total] = _combined(changes, {name: tensor.double() for name, tensor in action.items()})
            self.past[place] = action

    def _represent(self, gradient: Tensors) -> None:
        """`φ ← φ − η Σ_k (N_k / N) g^k` (Algorithm 1 l. 22), or along Adam's direction for that gradient."""
        assert isinstance(self.hparams, VFLGames)
        phi, rate = self.ensemble[MODEL], self.hparams.representation_rate
        step = [gradient[name].to(phi[name].device) for name in gradient]
        if self.hparams.optimizer == "adam":
            step = self.adam.direction(step)
        moved = {name: phi[name] - rate * part for name, part in zip(gradient, step, strict=True)}
        self.ensemble[MODEL] = phi | moved

    def _follow(self, server_round: int, accuracy: float) -> None:
        """Ends the game with the first low training accuracy after the warm-up; says how the curve has swung."""
        self.curve.append(accuracy)
        if server_round >= self.hparams.warm_start and accuracy < self.hparams.termination:
            self.ended = server_round
            self.notes.append({"kind": "equilibrium", "round": server_round, "accuracy": accuracy})
        settled = self.curve[self.hparams.warm_start - 1 :]
        if len(settled) > 1 and (self.ended or server_round == self.run.rounds):
            self.notes.append({"kind": "oscillation", "round": server_round, **oscillation(settled)})


def oscillation(curve: Sequence[float]) -> dict[str, Any]:
    """How a curve of two or more values swings.

    `variation`: its mean step, up or down; `deviation`: its mean standard deviation in windows of 50; `period`:
    the lag of the highest local maximum of its autocorrelation, 0 where there is none.
    """
    values = np.asarray(curve)
    windows = np.lib.stride_tricks.sliding_window_view(values, min(WINDOW, len(values)))
    centred = values - values.mean()
    correlation = np.correlate(centred, centred, "full")[len(values) - 1 :]
    inner = correlation[1:-1]
    peaks = 1 + np.flatnonzero((inner > correlation[:-2]) & (inner >= correlation[2:]))
    return {
        "variation": float(np.abs(np.diff(values)).mean()),
        "deviation": float(windows.std(axis=1).mean()),
        "period": int(peaks[correlation[peaks].argmax()]) if len(peaks) else 0,
    }


def _says_accuracy(reply: AcceptedReply) -> None:
    """Raises `Rejected` where a client does not say how the ensemble does on its training data."""
    found = reply.metrics.get("accuracy")
    if not isinstance(found, (int, float)) or not 0 <= found <= 1:
        raise Rejected(f"metric 'accuracy' is {found}, not a share of samples")


def _combined(terms: Iterable[tuple[float, Tensors]], like: Tensors) -> Tensors:
    """`Σ a_i θ_i` of weights and tensors, summed in float64, in the names and types of `like`; 0 for no terms."""
    total = {name: torch.zeros_like(tensor, dtype=torch.float64, device="cpu") for name, tensor in like.items()}
    for weight, tensors in terms:
        for name, value in total.items():
            value.add_(tensors[name].cpu(), alpha=weight)
    return {name: value.to(like[name].dtype) for name, value in total.items()}
