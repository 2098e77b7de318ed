"""The FedAvg of `same_work.py` in jax, FedJAX's way: a round of all clients is one compiled function.

Nothing of Perennial trains in it. It takes the data, the order of the mini-batches and the first weights from it,
so that the final parameters can be compared. `same_work.py` installs jax beside this environment. There must be an
MLP with one hidden layer, and as many samples at each client.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from local_engine import SEED
from torch import Tensor

from perennial.common.config import RunConfig
from perennial.common.models.network import network
from perennial.common.utils.seeding import torch_generator

Weights = list[Array]
"""Hidden weight and bias, output weight and bias, as PyTorch has them."""


def loss(weights: Weights, x: Array, y: Array) -> Array:
    """Mean cross-entropy of a mini-batch."""
    hidden = jax.nn.relu(x @ weights[0].T + weights[1])
    logits = hidden @ weights[2].T + weights[3]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def trained(weights: Weights, x: Array, y: Array, rate: float) -> Weights:
    """One client's weights after a step for each of its mini-batches (steps, batch, …)."""

    def step(own: Weights, batch: tuple[Array, Array]) -> tuple[Weights, None]:
        slope = jax.grad(loss)(own, *batch)
        return [value - rate * part for value, part in zip(own, slope, strict=True)], None

    return jax.lax.scan(step, weights, (x, y))[0]


@partial(jax.jit, static_argnames=("rate", "size"))
def one_round(weights: Weights, x: Array, y: Array, order: Array, rate: float, size: int) -> Weights:
    """The mean of all clients' weights; `order` (clients, n) is that of their samples."""
    rows = jnp.arange(len(x))[:, None]
    batches = len(x), order.shape[1] // size, size
    x, y = x[rows, order].reshape(*batches, -1), y[rows, order].reshape(batches)
    found = jax.vmap(partial(trained, rate=rate), in_axes=(None, 0, 0))(weights, x, y)
    return [value.mean(0) for value in found]


def run(
    config: RunConfig, watch: Callable[[int], object]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """All rounds; the final weights, and what each client keeps, which is nothing. Raises `ValueError` for other
    work than it can do."""
    scenario, method = config.scenario, config.method
    first = network(config.model, scenario.input_shape, scenario.classes).initial(SEED)
    data = [scenario.client_data(number, SEED, None).train for number in range(len(scenario.client_ids))]
    sizes = {len(train) for train in data}
    rate, size = method.learning_rate, method.batch_size  # type: ignore[attr-defined]
    if len(first) != 4 or method.name != "fedavg" or len(sizes) > 1 or min(sizes) % size:
        raise ValueError(
            "there is FedAvg of one hidden layer alone, with as many full mini-batches at each client"
        )
    weights = [jnp.asarray(tensor.numpy()) for tensor in first.values()]
    x = jnp.asarray(torch.stack([train.x for train in data]).numpy())
    y = jnp.asarray(torch.stack([train.y for train in data]).numpy())
    for round_ in range(1, config.rounds + 1):
        order = np.stack([
            torch.randperm(x.shape[1], generator=torch_generator(SEED, client, round_, "batches")).numpy()
            for client in scenario.client_ids
        ])  # fmt: skip
        weights = one_round(weights, x, y, jnp.asarray(order), rate, size)
        jax.block_until_ready(weights)
        watch(round_)
    return {name: torch.tensor(np.asarray(value)) for name, value in zip(first, weights, strict=True)}, {}
