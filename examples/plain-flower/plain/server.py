"""The ServerApp: the method's strategy in a loop of Flower's."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from perennial.strategies import FedIIR
from plain.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and save the model."""
    torch.manual_seed(0)
    model = Net()
    strategy = FedIIR(model=model, penalty=float(context.run_config["penalty"]))
    rounds = int(context.run_config["num-server-rounds"])
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    torch.save(result.arrays.to_torch_state_dict(), "plain.pt")
    print("test accuracy:", result.evaluate_metrics_clientapp[rounds]["global/accuracy"])
