"""FedSDR's local work: shortcut features discovered with all clients, and removed from the own model."""

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from perennial.client.objectives import centred, class_means, conditional_dependence, disagreement
from perennial.client.steps import Working
from perennial.client.trainer import LocalTrainer, Means, Metrics, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.shortcut import ENVIRONMENT_HEAD, SHORTCUT, ShortcutTraining, environment_head
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import NUM_EXAMPLES

ROUNDING = 1e-5
"""Of features, as a share of their root mean square: a deviation within classes below it is float32's rounding."""

WITHIN = "within-classes"
"""Record of the class means of Ψ^t's features, and of their deviation from these."""

S = TypeVar("S", bound=ShortcutTraining)


class ShortcutTrainer(LocalTrainer[S]):
    """Removal with the received Ψ^t, then discovery from it (thesis Algorithms 2 to 4)."""

    by_environment = True

    def train(self, received: Received) -> Reply:
        models, metrics = self.remove(received)
        shortcut, shortcut_metrics = self.discover(received)
        return Reply({**models, **shortcut}, {NUM_EXAMPLES: len(self.data.train), **metrics, **shortcut_metrics})

    def remove(self, received: Received) -> tuple[dict[str, Tensors], dict[str, float]]:
        """Steps of the personal model, which is kept, on `removal_loss`; the records to be sent, and metrics."""
        raise NotImplementedError

    def removal_loss(self, params: Tensors, batch: Examples, constants: Received) -> tuple[Tensor, Metrics]:
        """`l_SR(Φ, ω) = R(ω∘Φ) + γ I(Φ; Ψ^t | Y)` (thesis (4.8)), Ψ^t in units of its deviation within classes."""
        hparams, net, within = self.hparams, self.network, constants[WITHIN]
        features = net.features(params, batch.x, training=True)
        logits = net.classify(params, features, training=True)
        risk = self.criterion(logits, batch.y)
        outputs = centred(logits) if hparams.removed_from == "logits" else features
        shortcut = net.features(constants[SHORTCUT], batch.x)
        dependence = conditional_dependence(outputs, (shortcut - within["means"][batch.y]) / within["deviation"])
        return risk + hparams.removal * dependence, {"risk": risk, "dependence": dependence}

    def constants(self, received: Received) -> Received:
        """What `removal_loss` takes as constant: what was received, and how Ψ^t is within classes.

        Its class means are over all of the client's samples. So a class with one sample adds nothing to the
        dependence, and for a client with one class it is the covariance within that class.
        """
        shortcut, train, classes = self.each(self.network.features), self.data.train, self.network.outputs
        features = self.outputs(lambda x: shortcut(received[SHORTCUT], x), train.x)
        within = self.each(partial(within_classes, classes=classes))(features, train.y)
        return replace(received, arrays={**received.arrays, WITHIN: within})

    def discover(self, received: Received) -> tuple[dict[str, Tensors], dict[str, float]]:
        """R times: `(Ψ, ω) ← (Ψ, ω) − β ∇l_SD` with all ω_i frozen, then L steps of each own ω_i with Ψ frozen
        (thesis (4.5), (4.6)). Classifiers of other environments stay as they came."""
        hparams, net = self.hparams, self.network
        own = {environment_head(number): part for number, part in self.data.train.numbered().items()}
        shortcut = Working(received[SHORTCUT], net.parameter_names)
        own_heads = {name: Working(received[name], net.classifier_names) for name in own}
        samples = {name: self.stream(part, received.round, name) for name, part in own.items()}
        # What each of them is while the other is trained: the same memory.
        trained = {SHORTCUT: shortcut.tensors, **{name: head.tensors for name, head in own_heads.items()}}
        present = replace(received, arrays={**received.arrays, **trained})
        optimizer, means = self.optimizer(SHORTCUT), Means()
        for batch in self.batches(hparams.local_steps, received.round):
            gradient, metrics = self.gradient(shortcut, self.discovery_loss, batch, present)
            self.step(shortcut, optimizer, gradient, hparams.learning_rate)
            means.add(metrics)
            for name, head in own_heads.items():
                for part in islice(samples[name], hparams.environment_steps):
                    gradient, _ = self.gradient(head, self.head_risk, part, present)
                    head.step(gradient, hparams.learning_rate * self.rate_factor)
        trained = {SHORTCUT: shortcut.result(), **{name: head.result() for name, head in own_heads.items()}}
        return trained, means.result()

    def head_risk(self, params: Tensors, batch: Examples, present: Received) -> tuple[Tensor, Metrics]:
        """`R(ω_i∘Ψ)` with Ψ frozen (thesis (4.6))."""
        with torch.no_grad():
            features = self.network.features(present[SHORTCUT], batch.x)
        return self.criterion(self.network.classify(params, features), batch.y), {}

    def discovery_loss(self, params: Tensors, batch: Examples, present: Received) -> tuple[Tensor, Metrics]:
        """`l_SD(Ψ, ω) = R(ω∘Ψ) − min(α, λ l_dis(Ψ))` (thesis (4.5) and the text below it)."""
        hparams, net = self.hparams, self.network
        heads = [present[name] for name in sorted(present.arrays) if name.startswith(ENVIRONMENT_HEAD)]
        features = net.features(params, batch.x, training=True)
        risk = self.criterion(net.classify(params, features, training=True), batch.y)
        logits = torch.stack([net.classify(head, features) for head in heads])
        pairs = max(1, len(heads) * (len(heads) - 1)) if hparams.pairs == "mean" else 1
        distance = disagreement(logits, hparams.disagreement) / pairs
        gain = hparams.discovery * distance
        capped = (gain >= hparams.discovery_cap).to(gain)
        metrics = {"shortcut-risk": risk, "disagreement": distance, "capped": capped}
        return risk - gain.clamp(max=hparams.discovery_cap), metrics


def within_classes(features: Tensor, labels: Tensor, classes: int) -> Tensors:
    """Class means (classes, d) of features (n, d), and the root mean square of the features less these.

    Features that are constant within each class have no deviation, and in units of infinity they are 0.
    """
    means, _ = class_means(features, labels, classes)
    deviation = (features - means[labels]).square().mean().sqrt()
    some = deviation > ROUNDING * features.square().mean().sqrt()
    return {"means": means, "deviation": deviation.where(some, torch.inf)}
