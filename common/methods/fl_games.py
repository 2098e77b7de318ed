"""FL Games: hyper-parameters, and what both halves know of the game."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import EVERY, OWN_OPTIMIZER, STEPS, LocalTraining
from perennial.common.tasks import PredictionTask
from perennial.common.tasks.classes import ACCURACY
from perennial.common.utils.knobs import between, choice, knob

if TYPE_CHECKING:
    from perennial.common.utils.tensors import Tensors

PREDICTOR = "predictor"
OTHERS = "others"
ANSWERED = "answered"
"""Records: a client's predictor w^k, and in parameter space the sums over its opponents."""

PLAYERS = "players"
PLAYED = "played"
"""Settings of a request: the client ids of all players, and how often each has played."""


def has_accuracy(task: PredictionTask) -> bool:
    """Whether players have an accuracy to tell, by which the game ends. It does not end by another measure: the
    rule is IRM Games' code's, and its threshold has a meaning for the share of right answers alone."""
    return task.headline == ACCURACY


class FLGames(LocalTraining):
    """What the Fixed and the Variable game have in common."""

    keeps = frozenset({"predictor", "adam", "ensemble", "*.*"})
    sends = frozenset({("predictor", EVERY)})
    refuses: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(STEPS, OWN_OPTIMIZER),
        "label_smoothing": "whose players' risks are as the game has them",
    }

    source = "Gupta et al. 2022, arXiv 2205.11101"
    evaluates = ("ensemble",)
    family = "fl_games"
    learns: ClassVar[bool]
    """Whether the representation φ is learned or the identity."""

    order: Literal["parallel", "sequential"] = knob(
        "parallel",
        "all clients play in a round, each against the round before; or one, in turn, against the newest",
        source="FL Games §4.1, Algorithm 1 l. 20 and 26",
    )
    buffer: int = knob(
        5,
        "past predictors of each opponent that a client answers to (SMOOTH); 0: the present ones alone",
        symbol="|B_k|",
        source="FL Games Fig 3",
        ge=0,
        le=1000,
        search=choice(5),
    )
    smoothing: Literal["replace", "paper", "convex"] = knob(
        "replace",
        "the past in place of the present (§4.1's words), beside it (eq 5 as printed), or so at weights of sum 1",
        source="FL Games §4.1; paper: its eq 5; convex: ours",
    )
    space: Literal["function", "parameter"] = knob(
        "function",
        "what is summed: outputs, or the parameters of linear predictors, whose messages do not grow with clients",
        source="FL Games §3.2; parameter: ours, after its §4.1",
    )
    optimizer: Literal["adam", "sgd"] = knob(
        "adam", "steps of predictors and representation", source="IRM Games' code; sgd: FL Games Algorithm 1"
    )
    local_steps: int = knob(
        1,
        "updates of the predictor in a round, in `local_unit`",
        symbol="C",
        source="FL Games §5.3.4",
        ge=1,
        le=10_000,
        search=choice(1),
    )
    sampling: Literal["fresh", "epochs"] = knob(
        "fresh",
        "a round's mini-batches: drawn anew from all of a client's data, or the next of a shuffled pass over it",
        source="ours; epochs: IRM Games' code",
    )
    batch_size: int = knob(
        256,
        "samples in a mini-batch",
        source="IRM Games' code",
        ge=1,
        le=100_000,
        search=choice(128, 256, 512),
    )
    learning_rate: float = knob(
        2.5e-4,
        "step size of the predictors",
        source="IRM Games' code",
        gt=0,
        le=10,
        search=between(1e-4, 1e-3, log=True),
    )
    momentum: float = knob(
        0.0,
        "momentum of the steps of a round, for `optimizer` sgd alone",
        source="FL Games Algorithm 1 l. 4",
        ge=0,
        lt=1,
        search=choice(0.0),
    )
    warm_start: int = knob(
        100,
        "round from which on the game may end",
        source="IRM Games' code",
        ge=1,
        le=1_000_000,
        search=choice(100),
    )
    termination: float = knob(
        0.6,
        "the game ends with the ensemble whose training accuracy is the first below this; 0: it never ends",
        source="IRM Games' code",
        ge=0,
        le=1,
        search=choice(0.6),
    )
    ending_share: float = knob(
        1.0,
        "share of a client's training samples, drawn once, that `termination` is about; 0: those of a round",
        source="IRM Games' code, over all samples",
        ge=0,
        le=1,
        search=choice(1.0),
    )

    def misfit(self, scenario: Scenario) -> str:
        return self.clash(scenario, "model", "gradient", "config", "metrics", PREDICTOR, OTHERS, ANSWERED)

    def caution(self, scenario: Scenario) -> str:
        if scenario.clients == 1:
            return "With one client there is nobody to play against: this is local training."
        if self.termination and not has_accuracy(scenario.task):
            return f"Termination is an accuracy, which the task {scenario.task.name} has not: the game never ends."
        return super().caution(scenario)

    def turn(self, round_: int, players: int) -> int | None:
        """A number whose remainder by the players is whose turn it is; None: the representation's."""
        return round_ - 1

    def movers(self, round_: int, players: Sequence[str]) -> Sequence[str]:
        """Whose predictors step in a round, the first one being 1; nobody's in one of the representation."""
        turn = self.turn(round_, len(players))
        if turn is None:
            return []
        return players if self.order == "parallel" else [players[turn % len(players)]]

    def measures(self, round_: int, task: PredictionTask) -> bool:
        """Whether clients measure the ensemble beyond the samples of the round: where the game may end."""
        may_end = round_ >= self.warm_start and min(self.termination, self.ending_share) > 0
        return may_end and has_accuracy(task)

    def predictor(self, model: "Tensors") -> "Tensors":
        """A client's own part w of a model; all of it where φ is the identity."""
        from perennial.common.utils.tensors import part

        return part(model, "classifier") if self.learns else model

    def no_rule(self) -> str:
        return "whose ensemble has every client's own predictor in it"

    def weights(self, past: int) -> tuple[float, float]:
        """Of an opponent's present action, and of each of the `past` ones in its buffer (equations 4 and 5)."""
        if not past:
            return 1.0, 0.0
        return (0.0 if self.smoothing == "replace" else 1.0), 1 / past

    def divisor(self, players: int, remembered: int) -> int:
        """What the sum of a client's and its opponents' outputs is divided by.

        `remembered` opponents have something in their buffers. As printed, equation 5 divides 2m − 1 terms by m.
        """
        return players + remembered if self.smoothing == "convex" else players


class FFLGames(FLGames):
    """The Fixed game, φ = I: a client's predictor is a whole model."""

    title = "F-FL Games"
    summary = "clients train whole models against each other; their mean output is the model"
    learns = False

    name: Literal["f-fl-games"] = "f-fl-games"


class VFLGames(FLGames):
    """The Variable game: a common representation, and a head at each client."""

    title = "V-FL Games"
    summary = "clients train heads against each other, and between turns all a common featurizer below their mean"
    actions = ("train", "train.gradient", "evaluate")
    learns = True

    name: Literal["v-fl-games"] = "v-fl-games"
    representation_per: Literal["cycle", "turn"] = knob(
        "cycle",
        "φ steps before a cycle of all clients' turns, last to first; or before every turn, first to last",
        source="IRM Games (Ahuja et al. 2020), its code",
    )
    fast: bool = knob(
        True,
        "gradients for φ from all of a client's data (FAST), or from `local_steps` mini-batches",
        source="FL Games §4.1, Algorithm 1 l. 9",
    )
    representation_rate: float = knob(
        2.5e-5,
        "step size of the representation",
        symbol="η",
        source="IRM Games' code",
        gt=0,
        le=10,
        search=between(1e-5, 1e-4, log=True),
    )

    def turn(self, round_: int, players: int) -> int | None:
        """As in IRM Games' code a cycle is φ, then its players from the last to the first."""
        together = players if (self.order, self.representation_per) == ("sequential", "cycle") else 1
        cycles, place = divmod(round_ - 1, 1 + together)
        return (cycles + 1) * together - place if place else None
