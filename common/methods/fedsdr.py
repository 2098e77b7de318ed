"""FedSDR: hyper-parameters."""

from typing import Literal

from perennial.common.methods.shortcut import ShortcutTraining
from perennial.common.utils.knobs import choice, knob


class FedSDR(ShortcutTraining):
    """Personal models without the shortcut that the clients discover together."""

    title = "FedSDR"
    summary = "a shortcut extractor trained by all, and personal models made independent of it given the label"
    source = "Tang et al. 2024; Tang 2025, chapter 4, Algorithm 2"
    evaluates = ("personal",)

    name: Literal["fedsdr"] = "fedsdr"
    personal_steps: int = knob(
        10,
        "updates of the personal model in a round, in `local_unit`",
        symbol="K",
        source="Tang 2025 §4.5.2",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
