"""pFedMe: hyper-parameters."""

from typing import Literal

from perennial.common.methods.base import ONE_MODEL
from perennial.common.methods.proximal import ProximalTraining
from perennial.common.utils.knobs import choice, knob


class PFedMe(ProximalTraining):
    """A personal model at each client, solved around a copy of one global model."""

    title = "pFedMe"
    summary = "one global model that follows personal models, each solved near it (Moreau envelopes)"
    source = "Dinh et al. 2020"
    sums = ONE_MODEL

    name: Literal["pfedme"] = "pfedme"
    mixing: float = knob(
        1.0,
        "how far the global model moves to the mean of the clients' copies in a round",
        symbol="β",
        source="Tang 2025 Tab 3.2",
        ge=0,
        le=4,
        search=choice(0.5, 1.0, 2.0),
    )

    def server(self) -> str:
        return "uniform"
