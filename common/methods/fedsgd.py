"""FedSGD: hyper-parameters, also those of other methods whose clients send gradients and whose server steps."""

from typing import Literal

from perennial.common.methods.base import Method, Sum
from perennial.common.utils.knobs import between, choice, knob


class ServerTraining(Method):
    """What methods have in common whose server takes one step a round."""

    optimizer: Literal["sgd", "adam"] = knob(
        "sgd",
        "the server's steps: along the gradient, or Adam's, whose state stays at the server",
        source="McMahan et al. 2017; adam: FedILC §5.1",
    )
    learning_rate: float = knob(
        0.1,
        "step size of the server",
        symbol="η",
        source="not given in the papers, not tuned; FedILC's with adam: 3e-4",
        gt=0,
        le=10,
        search=between(1e-4, 1.0, log=True),  # from what suits Adam to what suits plain steps
    )
    weight_decay: float = knob(
        0.0,
        "weight of ½‖w‖² in the risk",
        source="McMahan et al. 2017; FedILC §5.1: 0.01",
        ge=0,
        le=1,
        search=choice(0.0, 1e-3, 1e-2),
    )


GRADIENTS = (Sum("train", "gradient"), Sum("train", "model"))
"""The gradient, and the model's buffers if it has some that move."""


class FedSGD(ServerTraining):
    """Gradient descent on the risk over all clients' data."""

    title = "FedSGD"
    summary = "one global model, one step of the server a round along the gradient on all clients' data"
    source = "McMahan et al. 2017"
    evaluates = ("global",)
    sums = GRADIENTS

    name: Literal["fedsgd"] = "fedsgd"
