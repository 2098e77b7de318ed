"""The work of `same_work.py` in pfl-research, as its users write it: its backend, its FedAvg, its PyTorch model.

Nothing of Perennial trains in it. It takes the data, the order of the mini-batches and the first weights from it,
so that the final parameters can be compared. `same_work.py` installs pfl-research beside this environment.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from local_engine import SEED
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from perennial.common.config import RunConfig
from perennial.common.data.examples import Examples
from perennial.common.models.architectures import build
from perennial.common.models.network import network
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors


class Drawn(Dataset):  # type: ignore[misc]
    """A client's samples, in the order of the round that is on."""

    def __init__(self, client: str, data: Examples, clock: "Rounds") -> None:
        super().__init__((data.x, data.y), user_id=client)
        self._data, self._clock = data, clock

    def iter(self, batch_size: int) -> Iterator[list[Tensor]]:
        """Its mini-batches."""
        key = torch_generator(SEED, self.user_id, self._clock.round, "batches")
        for index in torch.split(torch.randperm(len(self._data), generator=key), batch_size):
            yield [self._data.x[index], self._data.y[index]]


class Rounds(TrainingProcessCallback):  # type: ignore[misc]
    """Which round it is."""

    def __init__(self, watch: Callable[[int], object]) -> None:
        self.round, self._watch = 1, watch

    def after_central_iteration(self, metrics: Metrics, model: object, *, central_iteration: int) -> Any:
        """Called by pfl-research after each round, counted from 0."""
        self._watch(self.round)
        self.round = central_iteration + 2
        return False, Metrics()


class Ditto(FederatedAveraging):  # type: ignore[misc]
    """Its FedAvg, and after it a client's own model, pulled towards the global one."""

    def __init__(self, pull: float) -> None:
        super().__init__()
        self.pull, self.personal = pull, dict[str, Any]()

    def train_one_user(self, start: Any, model: Any, data: Drawn, context: Any) -> Any:
        """Called by pfl-research for each client; what goes to the server is FedAvg's."""
        found = super().train_one_user(start, model, data, context)
        model.set_parameters(self.personal.get(data.user_id, start))

        def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, *_: Any, **__: Any) -> None:
            net.loss(*batch).backward()  # type: ignore[operator]
            for name, parameter in net.named_parameters():
                parameter.grad.add_(parameter.detach() - start[name], alpha=self.pull)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

        model.do_multiple_epochs_of(data, context.model_train_params, step)
        self.personal[data.user_id] = model.get_parameters()
        return found


def run(config: RunConfig, watch: Callable[[int], object]) -> tuple[Tensors, dict[str, Tensors]]:
    """All rounds; the final weights, and what each client keeps."""
    torch.set_num_threads(1)
    np.random.seed(SEED)  # pfl-research draws its seeds from it
    scenario, method = config.scenario, config.method
    net = build(config.model, scenario.input_shape, scenario.classes)
    net.load_state_dict(network(config.model, scenario.input_shape, scenario.classes).initial(SEED))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    def metrics(x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(loss(x, y)) * len(y), len(y))}

    net.loss, net.metrics = loss, metrics  # type: ignore[assignment]
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    clock = Rounds(watch)
    data = {
        client: Drawn(client, scenario.client_data(number, SEED, None).train, clock)
        for number, client in enumerate(scenario.client_ids)
    }
    clients = FederatedDataset(data.__getitem__, get_user_sampler("minimize_reuse", list(data)))
    pull = getattr(method, "proximity", 0.0)
    algorithm = Ditto(pull) if pull else FederatedAveraging()
    algorithm.run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=config.rounds, evaluation_frequency=10**6,
            train_cohort_size=len(data), val_cohort_size=0,
        ),
        backend=SimulatedBackend(clients, clients, [WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=method.learning_rate,  # type: ignore[attr-defined]
            local_batch_size=method.batch_size,  # type: ignore[attr-defined]
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=10**6),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )  # fmt: skip
    kept = {client: dict(own.items()) for client, own in algorithm.personal.items()} if pull else {}
    return dict(net.state_dict()), kept
