"""Two columns that say how long a patient stays and what that costs, what there is beside it, and when it ends."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from perennial.common.data.columns import AnyColumn, CategoryColumn, NumberColumn
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Scenario
from perennial.common.tasks import Event, Labels, Numbers, PredictionTask
from perennial.common.tasks.numbers import NumbersLoss
from perennial.common.utils.seeding import torch_generator


class Stays(Scenario):
    """Days and euros, two labels, or the time of the discharge, by age and ward; of raw rows."""

    title = "days in hospital, two sites"
    source = "tests"
    dataset = "generated"

    name: Literal["stays"] = "stays"
    clients: int = 2
    targets: tuple[str, ...] = ("days", "euros")
    target: Literal["numbers", "labels", "event"] = "numbers"
    kind: NumbersLoss = "squared"
    mean: tuple[float, ...] = (7.5, 12_000.0)
    scale: tuple[float, ...] = (2.0, 3_000.0)
    times: tuple[float, ...] = (2.0, 5.0, 10.0)

    model: ClassVar[dict[str, Any]] = {"name": "mlp", "hidden": (8,)}
    input_shape: ClassVar[tuple[int, ...]] = (5,)
    column_names: ClassVar[tuple[str, ...]] = ("age", "ward")
    train_environments: ClassVar[tuple[str, ...]] = ("north", "south")
    test_environments: ClassVar[tuple[str, ...]] = ("away",)

    @property
    def cells(self) -> Mapping[str, AnyColumn]:
        wards = CategoryColumn(kind="category", categories=("heart", "lung"))
        return {"age": NumberColumn(kind="number", mean=50.0, scale=10.0, fill=48.0, missing=True), "ward": wards}

    @property
    def task(self) -> PredictionTask:
        if self.target == "labels":
            return Labels(self.targets)
        if self.target == "event":
            return Event(self.times)
        if self.kind == "poisson":
            return Numbers(self.targets, self.kind)
        return Numbers(self.targets, self.kind, self.mean, self.scale)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        away = {"away": self._draw(client, seed, "away", -1)}
        return ClientData(
            self._draw(client, seed, "train", client), self._draw(client, seed, "held", client), away
        )

    def _draw(self, client: int, seed: int, part: str, environment: int) -> Examples:
        generator = torch_generator(seed, client, "stays", part)
        x = torch.randn(40, *self.input_shape, generator=generator)
        noise = torch.randn(40, len(self.targets), generator=generator)
        signal = x[:, :1] + noise / 10
        if self.target == "labels":
            y = (signal > 0).float()
        elif self.target == "event":
            y = torch.cat([5 * signal[:, :1].exp(), (noise[:, 1:] < 1).float()], dim=1)
        else:
            y = self.task.predictions(signal)
        return Examples(x, y, torch.full((40,), environment))
