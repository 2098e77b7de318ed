"""Federated IRM: hyper-parameters."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from perennial.common.methods.base import ONE_MODEL
from perennial.common.methods.stateful import StatefulTraining
from perennial.common.utils.knobs import between, choice, knob


class InvariantTraining(StatefulTraining):
    """What methods have in common whose shared model is federated IRM's."""

    refuses: ClassVar[Mapping[str, str]] = {
        **StatefulTraining.refuses,
        "label_smoothing": "whose penalty is of the risk as it is",
    }

    CODE: ClassVar[Mapping[str, Any]] = {
        **StatefulTraining.CODE,
        "penalty": 1e9,
        "penalty_estimator": "single",
        "weight_decay": 0.0022,
    }

    penalty: float = knob(
        1e4,
        "weight of the shared model's IRM penalty after `anneal_rounds`",
        symbol="λ",
        source="ours; not given in PerInvFL",
        ge=0,
        le=1e12,
        search=between(1e2, 1e5, log=True),
    )
    anneal_rounds: int = knob(
        12,
        "rounds at the start in which no penalty weighs more than 1",
        source="PerInvFL's public code",
        ge=0,
        le=1_000_000,
        search=choice(0, 12, 60),
    )
    rescale: bool = knob(
        True,
        "divide the whole local objective by its penalty's weight where that is above 1",
        source="PerInvFL's public code",
    )
    penalty_estimator: Literal["single", "halves"] = knob(
        "halves",
        "g² of a mini-batch, too large by the variance of g, or the product of the g of its halves, unbiased",
        source="Arjovsky et al. 2019, appendix D",
    )


class Irm(InvariantTraining):
    """Every client is one environment of invariant risk minimisation."""

    title = "IRM"
    summary = "one global model, invariant risk minimisation with every client as one environment"
    source = "Arjovsky et al. 2019; federated in Tang et al. (PerInvFL) §4.1"
    evaluates = ("global",)
    sums = ONE_MODEL

    name: Literal["irm"] = "irm"
