"""DRFA, client half: FedAvg's steps with a snapshot on the way, and the loss of the mean snapshot."""

import torch

from perennial.client.steps import Working
from perennial.client.trainer import LocalTrainer, Means, Received, Reply
from perennial.common.methods.drfa import DRFA, LOSS, SNAPSHOT, SNAPSHOT_STEP
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES


class DRFAClient(LocalTrainer[DRFA]):
    """`w_u ← w_u − η ∇R(w_u; B)`, τ times from w^t, and w_u after t′ of them (Deng et al. 2020, Algorithm 1)."""

    stacks = ("train", "train.loss", "evaluate")

    def train(self, received: Received) -> Reply:
        hparams = self.hparams
        model, optimizer = Working(received[MODEL], self.network.parameter_names), self.optimizer()
        means = Means()
        snapshot: Tensors = {}
        last = self.mini_batches(int(received.settings[SNAPSHOT_STEP]))  # type: ignore[arg-type]
        for number, batch in enumerate(self.batches(hparams.local_steps, received.round), start=1):
            gradient, metrics = self.gradient(model, self.loss, batch, received)
            self.step(model, optimizer, gradient, hparams.learning_rate)
            means.add(metrics)
            if number == last:
                snapshot = {name: tensor.detach().clone() for name, tensor in model.tensors.items()}
        return Reply(
            {MODEL: model.result(), SNAPSHOT: snapshot}, {NUM_EXAMPLES: len(self.data.train), **means.result()}
        )

    def train_loss(self, received: Received) -> Reply:
        """`R(w′; D_u)` of the mean snapshot w′, over all of this client's training samples."""
        risk = self.mean_loss(self.predictor(received[SNAPSHOT]), self.data.train)
        sent = {LOSS: torch.as_tensor(risk, dtype=torch.float32)}
        return Reply({LOSS: sent}, {NUM_EXAMPLES: len(self.data.train)})
