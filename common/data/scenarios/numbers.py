"""Scenarios whose targets are numbers."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from perennial.common.data.datasets import load
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Spurious, drawn_data, with_oracle
from perennial.common.tasks import Numbers
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator, torch_generator

if TYPE_CHECKING:
    from torch import Tensor

Slope = Annotated[float, Field(ge=-100, le=100)]
TEST_SLOPES = (1.0, 0.5, 0.0, -0.5, -1.0)
"""Of the shortcut on the target in the test environments."""


class Sloped(Spurious):
    """A number to which a shortcut rises with the environment's slope a."""

    train_slopes: tuple[Slope, ...] = knob(
        (1.0, 0.5), "slope of the shortcut on the target in each training environment", symbol="a^e",
        min_length=1, max_length=100,
    )  # fmt: skip

    @property
    def train_environments(self) -> tuple[str, ...]:
        return tuple(f"a={a:g}" for a in self.train_slopes)

    @property
    def test_environments(self) -> tuple[str, ...]:
        return tuple(f"a={a:g}" for a in TEST_SLOPES)

    def environment(self, client: int) -> int:
        """The training environment of a client."""
        return client % len(self.train_slopes)


# ---------------------------------------------------------------------- diabetes

MEAN, DEVIATION = 152.13348, 77.00575
"""Of the progression, over all patients."""
MEASUREMENTS = 10


class DiabetesSites(Sloped):
    """Patients with diabetes, at sites by age, with a planted column that the progression can be read from.

    A site has the patients of one part of the ages, from the youngest on. Inputs are the ten measurements, each
    standardised over all patients, and the planted column: a t + `planted_noise` ε, of the standardised
    progression t, ε ~ N(0, 1) and the slope a of the environment. A client's test environments are the same
    patients, with ε drawn anew. Under `oracle` the planted column is zero.
    """

    title = "progression of diabetes, at sites by age, with a planted column whose sign turns; no download"
    source = "ours; the data of Efron et al. 2004, as scikit-learn has them"
    dataset = "diabetes"

    name: Literal["diabetes-sites"] = "diabetes-sites"
    clients: int = knob(4, "number of sites", symbol="N", ge=2, le=20)
    planted_noise: float = knob(0.5, "deviation of the planted column's noise, in deviations of the target", ge=0)
    validation_fraction: float = knob(0.2, "part of a site's training rows that is held out", ge=0, lt=1)
    test_fraction: float = knob(0.25, "part of a site's rows that is for testing", gt=0, lt=1)

    @property
    def task(self) -> Numbers:
        return Numbers(("progression",), mean=(MEAN,), scale=(DEVIATION,), least=(0.0,))

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (8,)}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (MEASUREMENTS + 1,)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import numpy as np
        import torch

        raw, client_id = load(self.dataset, data_root), self.client_ids[client]
        assert isinstance(raw.images, torch.Tensor)
        table = raw.images.double()
        table = ((table - table.mean(dim=0)) / table.std(dim=0, correction=0)).float()
        by_age = raw.images[:, 0].argsort(stable=True).numpy()
        own = numpy_generator(seed, client_id, "rows").permutation(np.array_split(by_age, self.clients)[client])
        tested = round(self.test_fraction * len(own))
        held_out = round(self.validation_fraction * (len(own) - tested))
        test, validation, train = (torch.from_numpy(part) for part in np.split(own, [tested, tested + held_out]))

        def examples(split: str, rows: "Tensor", slope: float, environment: int, *key: str) -> Examples:
            x, y = table[rows], raw.labels[rows, None].float()
            noise = torch.randn(len(rows), 1, generator=torch_generator(seed, client_id, split, "planted", *key))
            planted = slope * (y - MEAN) / DEVIATION + self.planted_noise * noise
            column = torch.zeros_like(planted) if self.oracle else planted
            return Examples(torch.cat([x, column], dim=1), y, torch.full((len(rows),), environment))

        place = self.environment(client)
        return ClientData(
            examples("train", train, self.train_slopes[place], place),
            examples("validation", validation, self.train_slopes[place], place),
            {
                name: examples("test", test, slope, -1, name)
                for name, slope in zip(self.test_environments, TEST_SLOPES, strict=True)
            },
        )


# ---------------------------------------------------------------------- linear model

WIDTH = 3
CAUSES, SHORTCUT = slice(0, WIDTH), slice(WIDTH, 2 * WIDTH)
"""Which of the 6 features are which."""
DISTANCE = "distance"
"""The test environment whose root mean squared error is an affine model's distance to the invariant one."""


class LinearSCM(Sloped):
    """A linear structural model with three causes, a number, and three features that follow from it.

    `y = w·x_c + noise · ε` with x_c ~ N(0, I) and a unit vector w of the seed; the shortcut is
    `x_s = a y u + shortcut_noise · N(0, I)`, with the unit vector u of equal entries and the environment's slope
    a. The invariant solution, E(y | x_c), has the weights (w, 0). Under `oracle` x_s is zero.

    In the test environment `distance`, y is what the invariant solution says of the samples ±√6 e_i, with the unit
    vectors e_i of all six features. So the mean squared error there of an affine model with weights β and
    intercept b is exactly `‖β − (w, 0)‖² + b²`.
    """

    title = "linear model of a number whose invariant solution is known, and the distance to it"
    source = "ours, after Arjovsky et al. 2019, §1"
    dataset = "generated"

    name: Literal["linear-scm"] = "linear-scm"
    clients: int = knob(8, "number of clients", symbol="N", ge=2, le=100_000)
    noise: float = knob(1.0, "deviation of the target around what its causes say", ge=0, le=100)
    shortcut_noise: float = knob(0.5, "deviation of the shortcut around what the target says", ge=0, le=100)
    train_samples: int = knob(300, "training and validation samples of a client", ge=2, le=1_000_000)
    test_samples: int = knob(200, "samples of a client in each test environment", ge=1, le=100_000)
    validation_fraction: float = knob(
        0.2, "part of a client's own training data that is held out for validation", ge=0, lt=1
    )

    @property
    def drawn_samples(self) -> int:
        return self.train_samples + self.test_samples * len(TEST_SLOPES)

    @property
    def task(self) -> Numbers:
        return Numbers()

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (2 * WIDTH,), "linear_features": True}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (2 * WIDTH,)

    @property
    def test_environments(self) -> tuple[str, ...]:
        return *super().test_environments, DISTANCE

    def invariant_weights(self, seed: int) -> "Tensor":
        """(w, 0), of all six features."""
        import torch

        w = torch.randn(WIDTH, generator=torch_generator(seed, "population", "causes"))
        return torch.cat([w / w.norm(), torch.zeros(WIDTH)])

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        client_id, invariant = self.client_ids[client], self.invariant_weights(seed)

        def draw(split: str, count: int, slope: float, environment: int, *key: str) -> Examples:
            """With causes and a target that depend on the split alone, and a shortcut on the key, too."""
            generator = torch_generator(seed, client_id, split, "causes")
            x = torch.zeros(count, 2 * WIDTH)
            x[:, CAUSES] = torch.randn(count, WIDTH, generator=generator)
            y = x @ invariant + self.noise * torch.randn(count, generator=generator)
            if not self.oracle:
                noise = torch.randn(
                    count, WIDTH, generator=torch_generator(seed, client_id, split, "shortcut", *key)
                )
                x[:, SHORTCUT] = slope * y[:, None] / WIDTH**0.5 + self.shortcut_noise * noise
            return Examples(x, y[:, None], torch.full((count,), environment))

        x = torch.cat([torch.eye(2 * WIDTH), -torch.eye(2 * WIDTH)]) * (2 * WIDTH) ** 0.5
        if self.oracle:
            x[:, SHORTCUT] = 0
        distance = Examples(x, (x @ invariant)[:, None], torch.full((len(x),), -1))
        place = self.environment(client)
        data = drawn_data(
            draw,
            train_samples=self.train_samples,
            validation_fraction=self.validation_fraction,
            test_samples=self.test_samples,
            own=(self.train_slopes[place], place),
            tests=dict(zip(super().test_environments, TEST_SLOPES, strict=True)),
        )
        return replace(data, test={**data.test, DISTANCE: distance})


PRESETS = with_oracle({"diabetes-sites": DiabetesSites(), "linear-scm": LinearSCM()})
