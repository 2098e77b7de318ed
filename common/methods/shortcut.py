"""What FedSDR and its combinations have in common: hyper-parameters, names of records."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import ONE_CLASS, ONE_MODEL, OWN_LOOP, LocalTraining, Sum
from perennial.common.utils.knobs import between, choice, knob

SHORTCUT = "shortcut"
"""The shortcut extractor Ψ and its label classifier ω, one model."""
ENVIRONMENT_HEAD = "environment-head-"


def environment_head(number: int) -> str:
    """The classifier ω_i, on Ψ, of training environment `number` (from 0)."""
    return f"{ENVIRONMENT_HEAD}{number}"


class ShortcutTraining(LocalTraining):
    """A shortcut extractor that all clients train, and personal models from which it is removed."""

    # The classifiers of environments need no classes: for any outputs (4.5) is the distance of two models. What is
    # removed does: (4.8) conditions on Y, and estimates E[Ψ|Y] by the mean over samples of equal Y. No two samples
    # have an equal number, so that every Ψ would be its own mean, and nothing would be removed.
    tasks = ("classes",)
    tasks_because = "what it removes are covariances among samples of one class"
    nearest = "perinvfl"
    refuses: ClassVar[Mapping[str, str]] = {**OWN_LOOP, **ONE_CLASS}

    keeps = frozenset({"personal"})
    sums = (*ONE_MODEL, Sum("train", SHORTCUT), Sum("train", ENVIRONMENT_HEAD + "*", "owner"))

    local_steps: int = knob(
        10,
        "updates of the extractor in a round, each with `environment_steps` after it",
        symbol="R",
        source="Tang 2025 §4.5.2",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
    environment_steps: int = knob(
        10,
        "mini-batch steps on each of the client's environment classifiers after an update of the extractor",
        symbol="L",
        source="ours; not given in Tang 2025",
        ge=0,
        le=10_000,
        search=choice(1, 5, 10),
    )
    learning_rate: float = knob(
        0.05,
        "step size of the shortcut extractor and the environment classifiers",
        symbol="β",
        source="ours, not tuned; Tang 2025 §4.5.2 has a value that we could not read",
        gt=0,
        le=10,
        search=between(1e-3, 0.3, log=True),
    )
    personal_learning_rate: float = knob(
        0.05,
        "step size of the personal model",
        symbol="η",
        source="ours, not tuned; we found no value in Tang 2025",
        gt=0,
        le=10,
        search=between(1e-3, 0.3, log=True),
    )
    discovery: float = knob(
        0.5,
        "weight of the environment classifiers' disagreement, which the shortcut extractor maximises",
        symbol="λ",
        source="Tang 2025 Tab 4.4, §4.5.8",
        ge=0,
        le=1e4,
        search=choice(0.0, 0.1, 0.5, 1.0, 10.0),
    )
    discovery_cap: float = knob(
        1.0,
        "most that the weighted disagreement can take off the risk; above it, it has no gradient",
        symbol="α",
        source="ours; we found no value in Tang 2025",
        gt=0,
        le=1e6,
        search=choice(0.5, 1.0, 5.0),
    )
    disagreement: Literal["logits", "probabilities", "kl"] = knob(
        "logits",
        "between two environment classifiers: squared distance of centred logits or of probabilities, or KL",
        source="Tang 2025 §4.4.1, after (4.4), of logits: ours; kl: (4.3)",
    )
    pairs: Literal["sum", "mean"] = knob(
        "sum",
        "whether the disagreement is summed over the pairs of environments or averaged",
        source="Tang 2025 (4.3); mean: ours",
    )
    removal: float = knob(
        2.0,
        "weight of the personal model's dependence on the shortcut features given the label",
        symbol="γ",
        source="ours for this estimate, docs/methods/fedsdr.md (Tang 2025: 1e4 on CMNIST, 1.4 on WaterBird)",
        ge=0,
        le=1e6,
        search=between(0.1, 100.0, log=True),
    )
    removed_from: Literal["logits", "features"] = knob(
        "logits",
        "what shall not depend on the shortcut features: the personal model's logits, or all of its features",
        source="features: Tang 2025 §4.4.2; logits: ours, docs/methods/fedsdr.md",
    )

    def server(self) -> str:
        return "shortcut"

    def caution(self, scenario: Scenario) -> str:
        environments = len(scenario.train_environments)
        if environments == 1:
            return (
                f"scenario {scenario.name!r} has one training environment, so no two classifiers can disagree and "
                "the shortcut extractor is trained on the risk alone"
            )
        if environments > 2 and self.pairs == "sum":
            return (
                f"the disagreement is a sum over pairs of {environments} environments; where it always exceeds "
                "discovery_cap (metric `capped` at 1), discovery has no effect: try pairs=mean or a larger cap"
            )
        return ""
