"""FedSDR+FedAvg: hyper-parameters."""

from typing import Literal

from perennial.common.methods.base import EVERY
from perennial.common.methods.shortcut import ShortcutTraining
from perennial.common.utils.knobs import choice, knob


class FedSDRFedAvg(ShortcutTraining):
    """FedSDR whose personal models start every round from their mean."""

    keeps = frozenset({"personal"})
    sends = frozenset({("personal", EVERY)})

    title = "FedSDR+FedAvg"
    summary = "FedSDR whose personal models are averaged and start every round from their mean"
    source = "Tang et al. 2024; Tang 2025, chapter 4, Algorithm 3"
    evaluates = ("global", "personal")

    name: Literal["fedsdr-fedavg"] = "fedsdr-fedavg"
    local_steps: int = knob(
        10,
        "updates in a round of the personal model, and of the extractor, each with `environment_steps` after it",
        symbol="R",
        source="Tang 2025 §4.5.2",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
