"""FedSDR+pFedMe: hyper-parameters."""

from typing import Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import BUFFERS
from perennial.common.methods.proximal import diverging
from perennial.common.methods.shortcut import ShortcutTraining
from perennial.common.utils.knobs import between, choice, knob


class FedSDRPFedMe(ShortcutTraining):
    """FedSDR whose personal models are solved around a copy of one global model, as pFedMe's."""

    keeps = frozenset({"personal"})
    sends = frozenset({("personal", BUFFERS)})

    title = "FedSDR+pFedMe"
    summary = "FedSDR whose personal models are each solved near a global model that follows them"
    source = "Tang et al. 2024; Tang 2025, chapter 4, Algorithm 4"
    evaluates = ("global", "personal")

    name: Literal["fedsdr-pfedme"] = "fedsdr-pfedme"
    local_steps: int = knob(
        10,
        "updates in a round of the local copy, and of the extractor, each with `environment_steps` after it",
        symbol="R",
        source="Tang 2025 §4.5.2",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
    personal_steps: int = knob(
        10,
        "updates of the personal model for each update of the local copy, in `local_unit`",
        symbol="K",
        source="Tang 2025 §4.5.2",
        ge=1,
        le=10_000,
        search=choice(1, 5, 10),
    )
    proximity: float = knob(
        15.0,
        "weight of ½‖f_u − w‖², the pull of the personal model f_u to the local copy w of the global one",
        symbol="μ (γ in the thesis)",
        source="pFedMe's default; not given in Tang 2025",
        ge=0,
        le=1e4,
        search=between(1.0, 30.0, log=True),
    )

    def misfit(self, scenario: Scenario) -> str:
        return diverging(self.personal_learning_rate, self.proximity + self.weight_decay, self.momentum)
