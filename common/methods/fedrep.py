"""FedRep: hyper-parameters."""

from collections.abc import Mapping
from typing import Literal, TypeVar

from perennial.common.methods.base import ONE_MODEL, LocalTraining
from perennial.common.models.settings import is_adapter
from perennial.common.utils.knobs import choice, knob

T = TypeVar("T")


class AlternatingTraining(LocalTraining):
    """What methods have in common whose clients train the classifier first and the featurizer after it."""

    local_steps: int = knob(
        10,
        "updates of the featurizer in a round, its classifier frozen",
        symbol="R",
        source="Tang 2025 §4.5.2",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
    head_steps: int = knob(
        10,
        "updates of the classifier in a round, before the featurizer's, in `local_unit`",
        symbol="τ_h, K",
        source="Tang 2025 §4.5.2 (K)",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )

    @property
    def keeps_adapters(self) -> bool:
        """Whether what a client keeps is LoRA's matrices, in place of the classifier."""
        return False


def own_part(tensors: Mapping[str, T], hparams: AlternatingTraining) -> dict[str, T]:
    """What of a model, by its tensors' names, a client keeps."""
    own = is_adapter if hparams.keeps_adapters else lambda name: name.startswith("classifier.")
    return {name: tensor for name, tensor in tensors.items() if own(name)}


class FedRep(AlternatingTraining):
    """A shared featurizer under classifiers that stay with the clients."""

    adapts = True
    keeps = frozenset({"head"})

    title = "FedRep"
    summary = "one shared featurizer, and a classifier that each client keeps"
    source = "Collins et al. 2021"
    evaluates = ("personal",)
    sums = ONE_MODEL

    name: Literal["fedrep"] = "fedrep"
    personal: Literal["classifier", "adapters"] = knob(
        "classifier", "what each client keeps: the classifier, or the matrices of `model.lora`", source="ours"
    )

    @property
    def keeps_adapters(self) -> bool:
        return self.personal == "adapters"
