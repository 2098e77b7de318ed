"""The predictor that looks at nothing: every client's most frequent training label."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from perennial.common.data.examples import ClientData
from perennial.common.data.scenario import Scenario
from perennial.server.study.runs import Selected
from perennial.server.summary import Evaluation, Row


def constant_rows(client: str, data: ClientData) -> list[Row]:
    """One client's evaluation rows, as a run would log them; of equally frequent labels the smallest counts.

    A client that does not train has no label of its own to say, and no rows.
    """
    if not len(data.train):
        return []
    label = int(torch.bincount(data.train.y).argmax())
    splits = {"validation": {"validation": data.validation}, "test": data.test}
    return [
        {
            "client": client,
            "split": split,
            "environment": list(parts),
            "count": [len(part) for part in parts.values()],
            "correct": [int((part.y == label).sum()) for part in parts.values()],
        }
        for split, parts in splits.items()
    ]


def constant_summary(clients: Iterable[tuple[str, ClientData]]) -> dict[str, Any]:
    """Its accuracies on the clients' data, as a run's summary has them."""
    return Evaluation(row for client, data in clients for row in constant_rows(client, data)).summary()


def constant_predictor(scenario: Scenario, seed: int, data_root: Path | None) -> Selected:
    """Its accuracies on the data of a seed. Raises `UserError` when the data set is not there."""
    clients = (
        (client, scenario.client_data(number, seed, data_root))
        for number, client in enumerate(scenario.client_ids)
    )
    return Selected.model_validate({"round": 0, **constant_summary(clients)})
