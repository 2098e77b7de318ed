"""The references of the selection `split`, client half."""

from dataclasses import replace

import torch

from perennial.client.trainer import LocalTrainer, Predictor, Received, Reply, Site
from perennial.common.methods.references import PARTS, SHARED, References, model_of, samples_of
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES


class ReferencesClient(LocalTrainer[References]):
    """FedAvg's local steps on f_e with the client's samples of environment e, for each that it has."""

    def train(self, received: Received) -> Reply:
        """The models of its environments; or what all models, and its shares in them, enter sums with."""
        reply = self.own_models(received)
        if not received.settings.get(SHARED):
            return reply
        found: dict[str, Tensors] = {}
        parts: Tensors = {}
        while (name := model_of(len(parts))) in received.arrays:
            start, after = received[name], reply.arrays.get(name, received[name])
            count = int(reply.metrics.get(samples_of(len(parts)), 0))  # type: ignore[arg-type]
            share = count / len(self.data.train)
            parts[name] = torch.tensor(share, dtype=torch.float64)
            found[name] = {
                key: before.double() + share * (after[key].double() - before.double())
                for key, before in start.items()
            }
        told = {name: reply.metrics[name] for name in (NUM_EXAMPLES, "risk")}
        return Reply({**found, PARTS: parts}, told)

    def own_models(self, received: Received) -> Reply:
        """The models of the client's environments, and how many samples it has of each."""
        trained, risks = {}, []
        counts: dict[str, int] = {NUM_EXAMPLES: len(self.data.train)}
        for part in self.data.train.by_environment():
            environment = int(part.environment[0])
            data = replace(self.data, train=part)
            site = Site(self.client, data, self.network, self.seed, task=self.task)
            start = {MODEL: received[model_of(environment)]}
            reply = LocalTrainer(site, self.hparams, {}).train(Received(received.round, start))
            trained[model_of(environment)] = reply.arrays[MODEL]
            counts[samples_of(environment)] = len(part)
            risks.append(float(reply.metrics["risk"]) * len(part) / len(self.data.train))  # type: ignore[arg-type]
        return Reply(trained, {**counts, "risk": sum(risks)})

    def models(self, received: Received) -> dict[str, Predictor]:
        """The model of the environment that most of the client's training samples are from."""
        environment = int(self.data.train.environment.bincount().argmax())
        return {"personal": self.predictor(received[model_of(environment)])}
