"""FedPAC, client half: FedRep's two phases, the second with features pulled to the global class centroids."""

from torch import Tensor

from perennial.client.methods.fedrep import FedRepClient
from perennial.client.objectives import centroid_distance, class_means
from perennial.client.trainer import Metrics, Predictor, Received, Reply, in_pieces
from perennial.common.data.examples import Examples
from perennial.common.methods.fedpac import CENTROIDS, STATISTICS, FedPAC
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import HEAD, MODEL, NUM_EXAMPLES


class FedPACClient(FedRepClient[FedPAC]):
    """`h_u ← h_u − η ∇_h R`, then `φ_u ← φ_u − η ∇_φ (R + λ/(n d) Σ_i ‖φ_u(x_i) − c_{y_i}‖²)` (Xu et al. 2023).

    Both classifier and featurizer are received and sent: the server combines the classifiers for each client.
    """

    def train(self, received: Received) -> Reply:
        start = self.received_model(received)
        trained, metrics = self.alternate(start, self.aligned_loss, received)
        arrays = {MODEL: trained, STATISTICS: self.statistics(start), CENTROIDS: self.centroids(trained)}
        return Reply(arrays, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def aligned_loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """`R(h∘φ; B) + λ/(n d) Σ_i ‖φ(x_i) − c_{y_i}‖²`."""
        z = self.network.features(params, batch.x, training=True)
        risk = self.criterion(self.network.classify(params, z, training=True), batch.y)
        centroids = received[CENTROIDS]
        distance = centroid_distance(z, batch.y, centroids["mean"], centroids["count"])
        return risk + self.hparams.alignment * distance, {"risk": risk, "alignment": distance}

    def features(self, model: Tensors) -> Tensor:
        """Features of all training samples."""
        return in_pieces(lambda x: self.network.features(model, x), self.data.train.x)

    def statistics(self, model: Tensors) -> Tensors:
        """`s_{u,k} = p_u(k) μ_{u,k}` and `V_u = 1/n_u Σ_k (p_u(k) E‖z‖²_k − p_u(k)² ‖μ_{u,k}‖²)`, of φ^t."""
        features, labels = self.features(model), self.data.train.y
        means, counts = class_means(features, labels, self.network.outputs)
        shares = means * (counts / len(labels))[:, None]
        # Σ_k p(k) E‖z‖²_k is the mean over all samples.
        variance = (features.square().sum(dim=1).mean() - shares.square().sum()) / len(labels)
        return {"mean": shares, "variance": variance.clamp(min=0)}  # which rounding may bring below

    def centroids(self, model: Tensors) -> Tensors:
        """Class means of the features after training, and their weights."""
        means, counts = class_means(self.features(model), self.data.train.y, self.network.outputs)
        return {"mean": means, "count": counts.float()}

    def received_model(self, received: Received) -> Tensors:
        """The shared featurizer under this client's combined classifier."""
        return {**received[MODEL], **received[HEAD]}

    def models(self, received: Received) -> dict[str, Predictor]:
        return {"personal": self.predictor(self.received_model(received))}
