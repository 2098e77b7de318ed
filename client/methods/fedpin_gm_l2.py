"""FedPIN's global model and personal ones pulled towards it, client half."""

from perennial.client.methods.ditto import pulled
from perennial.client.methods.fedpin_gm import FedPINGMClient
from perennial.client.trainer import Received, Reply
from perennial.common.methods.fedpin import FedPINGML2
from perennial.common.wire import PERSONAL


class FedPINGML2Client(FedPINGMClient[FedPINGML2]):
    """The global side's training, then Ditto's steps on `R(θ) + (μ/2) ‖θ − θ_GM‖²` with the received θ_GM."""

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        reply = super().train(received)
        self.visit(received)
        return reply

    def visit(self, received: Received) -> None:
        self.kept[PERSONAL] = pulled(self, received)
