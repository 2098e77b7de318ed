"""IFCA, client half: FedAvg's steps on the one of K models that fits best."""

import math

from perennial.client.trainer import LocalTrainer, Predictor, Received, Reply
from perennial.common.methods.ifca import IFCA
from perennial.common.wire import MODEL, NUM_EXAMPLES


class IFCAClient(LocalTrainer[IFCA]):
    """`k_i = argmin_k R(w_k; D_i)`, then `w_i ← w_i − η ∇R(w_i; B)`, `local_steps` times from w_{k_i}.

    Ghosh et al. 2020, Algorithm 1 with model averaging.
    """

    def train(self, received: Received) -> Reply:
        cluster = self.cluster(received)
        trained, metrics = self.descend(received[self.hparams.model_names[cluster]], self.loss, received)
        return Reply({MODEL: trained}, {NUM_EXAMPLES: len(self.data.train), **metrics}, {"cluster": cluster})

    def cluster(self, received: Received) -> int:
        """The number of the model with the least risk on all of this client's training data, first of equals.

        A risk that is no number is the worst: a hostile client may have made its model overflow.
        """
        models = [self.predictor(received[name]) for name in self.hparams.model_names]
        risks = [self.mean_loss(predict, self.data.train) for predict in models]
        return min(range(len(risks)), key=lambda k: (math.isnan(risks[k]), risks[k]))

    def visit(self, received: Received) -> None:
        """Nothing: `models` does it all."""

    def models(self, received: Received) -> dict[str, Predictor]:
        return {"personal": self.predictor(received[self.hparams.model_names[self.cluster(received)]])}
