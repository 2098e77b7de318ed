"""CGPFL-Heur, client half: CGPFL's, and an estimate of the smoothness of the client's risk where it is wanted."""

import torch
from torch import Tensor

from perennial.client.methods.cgpfl import CGPFLClient
from perennial.client.objectives import largest_eigenvalue
from perennial.client.steps import Working
from perennial.client.trainer import Received, Reply
from perennial.common.methods.cgpfl_heur import CGPFLHeur
from perennial.common.utils.seeding import torch_generator
from perennial.common.wire import MODEL


class CGPFLHeurClient(CGPFLClient[CGPFLHeur]):
    """CGPFL's client; with `mu` "lambda" it reports `smoothness` while the number of contexts is open."""

    def train(self, received: Received) -> Reply:
        reply = super().train(received)
        if self.hparams.mu != "lambda" or received.round > self.hparams.heur_rounds:
            return reply
        return Reply(reply.arrays, {**reply.metrics, "smoothness": self.smoothness(received)})

    def smoothness(self, received: Received) -> float:
        """L: largest |eigenvalue| of the Hessian of the client's risk at the received model."""
        model = Working(received[MODEL], self.network.parameter_names)
        risk, _ = self.loss(model.tensors, self.data.train, received)
        gradient = _flat(model.gradient(risk, create_graph=True))
        params = [model.tensors[name] for name in self.network.parameter_names]

        def multiply(vector: Tensor) -> Tensor:
            product = torch.autograd.grad(gradient @ vector, params, retain_graph=True, materialize_grads=True)
            return _flat(product) + self.hparams.weight_decay * vector

        generator = torch_generator(self.seed, self.client, received.round, "smoothness")
        start = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype).to(gradient.device)
        return largest_eigenvalue(multiply, start)


def _flat(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
