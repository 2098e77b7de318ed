"""What PerInvFL, its ablations and the baselines of its tables have in common: hyper-parameters."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from perennial.common.methods.base import OWN_OPTIMIZER, STEPS, PresetTraining
from perennial.common.utils.knobs import between, choice, knob


class StatefulTraining(PresetTraining):
    """The preset is the only setting that picks an algorithm, and the defaults of the others go with it."""

    keeps = frozenset({"optimizer-shared"})
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(STEPS, OWN_OPTIMIZER)

    CODE: ClassVar[Mapping[str, Any]] = {
        "optimizer": "adam",
        "batch_order": "sequential",
        "batch_size": 200,
        "local_steps": 5,
        "learning_rate": 5e-4,
    }
    """The defaults of the authors' public code, Tangx-yy/Per-InvFL."""

    preset: Literal["paper", "code"] = knob(
        "paper",
        "the paper's algorithm, or its authors' public code's, whose settings are then defaults (docs/methods)",
        source="PerInvFL Algorithm 1; code: Tangx-yy/Per-InvFL",
    )
    optimizer: Literal["sgd", "adam"] = knob(
        "sgd",
        "gradient steps, or Adam, whose state stays at the client from round to round",
        source="PerInvFL Algorithm 1",
    )
    learning_rate: float = knob(
        0.05,
        "step size of the shared model",
        symbol="γ",
        source="ours; not given in PerInvFL",
        gt=0,
        le=10,
        search=between(1e-3, 0.3, log=True),
    )
    momentum: float = knob(
        0.0,
        "momentum of sgd, fresh in every round; adam has its own",
        source="plain gradient steps, PerInvFL Algorithm 1",
        ge=0,
        lt=1,
        search=choice(0.0, 0.9),
    )
    batch_order: Literal["shuffled", "sequential"] = knob(
        "shuffled",
        "mini-batches drawn anew, or always the same ones in turn, going on where the last round ended",
        source="ours; sequential: PerInvFL's public code",
    )
    mixing: float = knob(
        1.0,
        "how far the server moves to the mean of the clients' models in a round",
        symbol="α",
        source="PerInvFL's public code; not given in the paper",
        ge=0,
        le=1,
        search=choice(0.5, 1.0),
    )

    def server(self) -> str:
        return "uniform"
