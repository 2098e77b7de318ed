"""What pFedMe and CGPFL have in common: hyper-parameters; and when steps along a pull would diverge."""

from collections.abc import Mapping
from typing import ClassVar

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import BUFFERS, STEPS, LocalTraining
from perennial.common.utils.knobs import between, choice, knob


def diverging(rate: float, pull: float, momentum: float, name: str = "personal_learning_rate") -> str:
    """Why steps of size `rate` on `½ pull ‖θ‖²` would diverge, as a misfit; empty where they do not.

    `name` is the setting that `rate` is of. A gradient step shrinks θ only if `rate · pull` < 2, with heavy-ball
    momentum m if it is < 2 (1 + m).
    """
    limit = 2 * (1 + momentum)
    if rate * pull < limit:
        return ""
    return (
        f"{name}: {rate:g} is too large for proximity + weight_decay = {pull:g}, the steps would diverge; it must "
        f"be below {limit / pull:.3g}"
    )


class ProximalTraining(LocalTraining):
    """What pFedMe and CGPFL have in common: a personal model θ solved around a local copy ω̃ that follows it."""

    adapts = True
    keeps = frozenset({"personal"})
    sends = frozenset({("personal", BUFFERS)})
    refuses: ClassVar[Mapping[str, str]] = {
        name: "whose steps towards a proximal point are plain ones, or with momentum"
        for name in STEPS
        if name not in ("augment", "mix")
    }

    evaluates = ("global", "personal")

    local_steps: int = knob(
        10,
        "local iterations of a round: `personal_steps` steps of θ on one mini-batch, then one step of ω̃",
        symbol="R",
        source="Tang 2025 Fig 3.3, Tab 3.2",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
    personal_steps: int = knob(
        5,
        "gradient steps on θ in a local iteration, all on the same mini-batch",
        symbol="S",
        source="Tang 2025 Tab 3.1",
        ge=1,
        le=10_000,
        search=choice(1, 5, 10),
    )
    batch_size: int = knob(
        20,
        "samples in a mini-batch",
        source="pFedMe's public code; not given in Tang 2025",
        ge=1,
        le=100_000,
        search=choice(20, 50, 100),
    )
    proximity: float = knob(
        12.0,
        "weight of ½‖θ − ω̃‖², the pull of the personal model to the local copy",
        symbol="λ",
        source="Tang 2025 Tab 3.1; search: Tab 3.2",
        ge=0,
        le=1e4,
        search=between(7.0, 19.0),
    )
    learning_rate: float = knob(
        0.005,
        "step size of ω̃, which moves towards θ by the fraction γ = learning_rate · proximity",
        symbol="lr",
        source="Tang 2025 Tab 3.1 (0.03 on CIFAR10), read as pFedMe's, docs/methods/pfedme.md",
        gt=0,
        le=10,
        search=between(1e-3, 0.03, log=True),
    )
    personal_learning_rate: float = knob(
        0.02,
        "step size of θ",
        symbol="η",
        source="not given in Tang 2025; stable on standardised pictures, docs/methods/cgpfl.md",
        gt=0,
        le=10,
        search=choice(0.01, 0.02, 0.05, 0.1),
    )

    def misfit(self, scenario: Scenario) -> str:
        return diverging(self.personal_learning_rate, self.proximity + self.weight_decay, self.momentum)
