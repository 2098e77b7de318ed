"""IFCA, server half: K models, each the mean of what the clients made of it that chose it."""

from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord

from perennial.common.config import RunConfig
from perennial.common.methods.ifca import IFCA
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, Payload
from perennial.strategies.screening import Rejected


class IFCAStrategy(MethodStrategy[IFCA]):
    """`w_k ← Σ_{i: k_i = k} (n_i / Σn) w_i`; a model that nobody chose stays (Ghosh et al. 2020, Algorithm 1)."""

    robust = True

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        draw = self.hparams.start
        self.models: dict[str, Tensors] = {
            # The first model of the first draw is every other method's initial one.
            name: self.network.initial(run.seed, *(("ifca", draw, k) if draw or k else ()))
            for k, name in enumerate(self.hparams.model_names)
        }
        """The models by record name, in the order of the clusters' numbers."""

    def state_dict(self) -> dict[str, Tensors]:
        return self.models

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.models = {name: state[name] for name in self.models}

    def results(self, arrays: ArrayRecord) -> dict[str, Tensors]:
        return {**super().results(arrays), **self.models}

    def payload(self, model: Tensors) -> Payload:
        """All models; the client chooses."""
        return self.models

    def expect(self, model: Tensors) -> Payload:
        return {MODEL: model}

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        """The mean by cluster, and that of all replies."""
        means = {name: self.mean(self.models.get(name)) for name in (MODEL, *self.models)}
        labels: dict[str, int] = {}
        for reply in replies:
            labels[reply.client] = self.cluster(reply)
            for name in (MODEL, self.hparams.model_names[labels[reply.client]]):
                means[name].add(reply[MODEL], self.weight(reply))
        self.notes.append({"kind": "clusters", "round": server_round, "labels": labels})
        return {name: mean.result() for name, mean in means.items() if mean.weight}

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        """The new models; the global arrays, which no client is sent, are the mean of all replies."""
        self.load_state_dict({**self.models, **means})
        return means[MODEL]

    def check(self, reply: AcceptedReply) -> None:
        self.cluster(reply)

    def cluster(self, reply: AcceptedReply) -> int:
        """The number of the model that a client chose. Raises `Rejected` where there is none such."""
        number = reply.settings.get("cluster")
        if type(number) is not int or not 0 <= number < self.hparams.clusters:
            raise Rejected(f"its cluster is {number!r}, not one of 0 to {self.hparams.clusters - 1}")
        return number
