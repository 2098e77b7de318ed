"""The work of `same_work.py` as a plain simulation app of Flower's, with Flower's own strategy.

Nothing of Perennial runs in it. It takes from it the data, the order of the mini-batches and the first weights, so
that the final parameters can be compared.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from local_engine import SEED

from perennial.common.config import RunConfig, load_config
from perennial.common.data.examples import Examples
from perennial.common.models.architectures import build
from perennial.common.models.network import network
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors

DATA: dict[int, Examples] = {}
"""Of a process, by the number of the client."""
CONFIGS: dict[str, RunConfig] = {}


def train(text: str, message: Message, context: Context) -> Message:
    """One pass of plain SGD over a client's data, and with Ditto one of its own model, which its context keeps."""
    torch.set_num_threads(1)
    if text not in CONFIGS:
        import json

        CONFIGS[text] = load_config(options=json.loads(text))
    config = CONFIGS[text]
    scenario, method = config.scenario, config.method
    number = int(context.node_config["partition-id"])
    if number not in DATA:
        DATA[number] = scenario.client_data(number, SEED, None).train
    data, state = DATA[number], context.state
    weights = message.content.array_records["arrays"].to_torch_state_dict()
    round_ = message.content.config_records["config"]["server-round"]
    key = torch_generator(SEED, scenario.client_ids[number], int(str(round_)), "batches")
    order = torch.randperm(len(data), generator=key)
    model = build(config.model, scenario.input_shape, scenario.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=method.learning_rate)  # type: ignore[attr-defined]
    pull = getattr(method, "proximity", 0.0)
    trained = {}
    for own in (False, True) if pull else (False,):
        model.load_state_dict(
            state.array_records["own"].to_torch_state_dict() if own and "own" in state else weights
        )
        anchors = [weights[name] for name, _ in model.named_parameters()]
        for index in torch.split(order, method.batch_size):  # type: ignore[attr-defined]
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[index]), data.y[index]).backward()  # type: ignore[no-untyped-call]
            if own:
                for parameter, anchor in zip(model.parameters(), anchors, strict=True):
                    parameter.grad.add_(parameter.detach() - anchor, alpha=pull)  # type: ignore[union-attr]
            optimizer.step()
        trained[own] = ArrayRecord({name: tensor.clone() for name, tensor in model.state_dict().items()})
    if pull:
        state["own"] = trained[True]
    metrics = MetricRecord({"num-examples": len(data)})
    return Message(RecordDict({"arrays": trained[False], "metrics": metrics}), reply_to=message)


class Watched(FedAvg):
    """Flower's FedAvg, which says when a round is done."""

    def __init__(self, watch: Callable[[int], object], **settings: Any) -> None:
        super().__init__(**settings)
        self._watch = watch

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found = super().aggregate_train(server_round, replies)
        self._watch(server_round)
        return found


def run(config: RunConfig, watch: Callable[[int], object]) -> tuple[Tensors, dict[str, Tensors]]:
    """All rounds; the final weights, and what each client keeps."""
    scenario, text, found = config.scenario, config.model_dump_json(), dict[str, Any]()
    weights = network(config.model, scenario.input_shape, scenario.classes).initial(SEED)
    server, client = ServerApp(), ClientApp()

    @client.train()
    def train_there(message: Message, context: Context) -> Message:
        import plain_flower  # by its name, or each message would bring all of it, and an empty `DATA`

        return plain_flower.train(text, message, context)

    @client.query()
    def kept(message: Message, context: Context) -> Message:
        number = MetricRecord({"number": int(context.node_config["partition-id"])})
        return Message(RecordDict({"own": context.state["own"], "number": number}), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Watched(
            watch, fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=scenario.clients,
            min_train_nodes=scenario.clients,
        )  # fmt: skip
        ended = strategy.start(grid, ArrayRecord(weights), num_rounds=config.rounds, train_config=ConfigRecord())
        found["weights"] = ended.arrays.to_torch_state_dict()
        found["personal"] = {}
        if hasattr(config.method, "proximity"):
            asked = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
            for reply in grid.send_and_receive(asked):
                number = int(reply.content.metric_records["number"]["number"])  # type: ignore[arg-type]
                own = reply.content.array_records["own"].to_torch_state_dict()
                found["personal"][scenario.client_ids[number]] = own

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, client, scenario.clients, backend_config={"client_resources": resources})
    return found["weights"], dict(sorted(found["personal"].items()))
