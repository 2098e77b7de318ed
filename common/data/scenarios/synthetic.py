"""Generated data whose causes are known."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import by_environment
from perennial.common.data.scenario import Spurious, with_oracle
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator, torch_generator

if TYPE_CHECKING:
    from torch import Tensor
GLOBAL, PERSONAL, SHORTCUT = slice(0, 3), slice(3, 6), slice(6, 12)
"""Which of the 12 latent features are which."""
FEATURES = 12
CAUSAL_MEAN, CAUSAL_NOISE = 1.5, 2.0
"""Deviation of the means of global and personal features over draws, and of the features around their mean.

The thesis' "N(0, 1.5 I)" and "N(0, 0.75 I)" are read as deviations: then causal features and shortcut have the
same signal-to-noise ratio.
"""
SHORTCUT_MEAN, SHORTCUT_NOISE = 0.75, 1.0


@dataclass(frozen=True)
class Population:
    """What the data of a seed are drawn from: features N(y μ, σ² I) for y = ±1, seen through `mixing`."""

    mixing: "Tensor"
    """(12, 12), orthogonal: a sample is x = mixing · z."""
    global_mean: "Tensor"
    """(3,), everyone's."""
    shortcut_mean: "Tensor"
    """(environments, 6), the training environments first, then the unseen ones."""

    def latent(self, x: "Tensor") -> "Tensor":
        """The latent features z (n, 12) of samples x (n, 12), by `GLOBAL`, `PERSONAL` and `SHORTCUT`."""
        return x @ self.mixing


class SyntheticSCM(Spurious):
    """The thesis' linear structural model; a client has one training environment, and all unseen ones for testing.

    Given the label y = ±1, equally likely: `z_g ~ N(y μ_g, 2² I)`, the same for all; `z_u ~ N(y μ_u, 2² I)`, the
    client's own, in training and test; `z_s ~ N(y μ_s^e, I)`, the environment's. All μ are drawn around 0, but
    μ_s^e of seen and unseen environments around `common_shortcut`. Under `oracle` z_s is zero.
    """

    title = "linear model with known global, personal and shortcut features, tested in unseen environments"
    source = "FedSDR, Tang 2025 §4.5.1"
    dataset = "generated"

    name: Literal["synthetic-scm"] = "synthetic-scm"
    clients: int = knob(100, "number of clients", symbol="N", source="Tang 2025 §4.5.1", ge=1, le=100_000)
    seen: int = knob(
        10, "training environments; a client has one of them", source="Tang 2025 §4.5.1", ge=1, le=1000
    )
    unseen: int = knob(50, "test environments; 5,000 in the thesis", source="Tang 2025 §4.5.1", ge=1, le=5000)
    train_samples: int = knob(
        1000,
        "training and validation samples of a client",
        source="Tang 2025 §4.5.1: 10,000 per environment",
        ge=1,
        le=1_000_000,
    )
    test_samples: int = knob(
        100,
        "samples of a client in each test environment",
        source="Tang 2025 §4.5.1: 10,000 per environment",
        ge=1,
        le=10_000,
    )
    validation_fraction: float = knob(
        0.1, "part of a client's own training data that is held out for validation", ge=0, lt=1
    )
    common_shortcut: float = knob(
        0.0,
        "mean of the entries of μ_s over environments, seen and unseen; above 0 they share a direction",
        symbol="m",
        source="0: Tang 2025 §4.5.1 as written; above 0: ours",
        ge=0,
        le=10,
    )
    mixed: bool = knob(True, "samples are a random rotation of the features, not the features themselves")

    @property
    def drawn_samples(self) -> int:
        return self.train_samples + self.test_samples * len(self.test_environments)

    @property
    def rounds(self) -> int:
        return 600

    @property
    def participation(self) -> float:
        return 0.1

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (6,), "linear_features": True}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (FEATURES,)

    @property
    def classes(self) -> int:
        return 2

    @property
    def train_environments(self) -> tuple[str, ...]:
        return tuple(f"seen-{number}" for number in range(self.seen))

    @property
    def test_environments(self) -> tuple[str, ...]:
        return tuple(f"unseen-{number}" for number in range(self.unseen))

    def population(self, seed: int) -> Population:
        """What this seed's data are drawn from."""
        import torch

        normal = partial(_normal, seed)
        mixing = torch.eye(FEATURES)
        if self.mixed:
            mixing = torch.linalg.qr(normal(1.0, "mixing", shape=(FEATURES, FEATURES)).double()).Q.float()
        return Population(
            mixing,
            normal(CAUSAL_MEAN, "global", shape=(3,)),
            torch.stack(
                [
                    self.common_shortcut + normal(SHORTCUT_MEAN, "shortcut", name, shape=(6,))
                    for name in (*self.train_environments, *self.test_environments)
                ]
            ),
        )

    def personal_mean(self, client: int, seed: int) -> "Tensor":
        """μ_u of a client (3,)."""
        return _normal(seed, CAUSAL_MEAN, "personal", self.client_ids[client], shape=(3,))

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        population, environments = _everybody(self, seed)
        client_id, own = self.client_ids[client], environments[client]
        personal_mean = self.personal_mean(client, seed)

        def draw(names: Sequence[str], first: int, count: int, environment: int) -> list[Examples]:
            """The samples of each environment, from the number `first` on; all but the draws at once."""
            generators = [torch_generator(seed, client_id, "samples", name) for name in names]
            y = torch.stack([torch.randint(2, (count,), generator=generator) for generator in generators])
            noise = torch.stack([torch.randn(count, FEATURES, generator=generator) for generator in generators])
            sign, shortcut = 2.0 * y[..., None] - 1, population.shortcut_mean[first : first + len(names), None]
            z = torch.empty_like(noise)
            z[..., GLOBAL] = sign * population.global_mean + CAUSAL_NOISE * noise[..., GLOBAL]
            z[..., PERSONAL] = sign * personal_mean + CAUSAL_NOISE * noise[..., PERSONAL]
            z[..., SHORTCUT] = sign * shortcut + SHORTCUT_NOISE * noise[..., SHORTCUT]
            if self.oracle:
                z[..., SHORTCUT] = 0
            # Products one by one, which together may come out another in the last digit.
            x = [own @ population.mixing.T for own in z]
            return [Examples(*own) for own in zip(x, y, torch.full_like(y, environment), strict=True)]

        held_out = round(self.validation_fraction * self.train_samples)
        (train,), (validation,) = (
            draw([name], own, count, own)
            for name, count in {"train": self.train_samples - held_out, "validation": held_out}.items()
        )
        tests = draw(self.test_environments, self.seen, self.test_samples, -1)
        return ClientData(train, validation, dict(zip(self.test_environments, tests, strict=True)))


def _normal(seed: int, deviation: float, *key: str | int, shape: tuple[int, ...]) -> "Tensor":
    import torch

    return deviation * torch.randn(shape, generator=torch_generator(seed, "population", *key))


@lru_cache(maxsize=4)
def _everybody(scenario: SyntheticSCM, seed: int) -> tuple[Population, list[int]]:
    """The population and each client's training environment, made once per process for all of a run's clients."""
    deal = numpy_generator(seed, "partition", "environments")
    return scenario.population(seed), by_environment(scenario.clients, scenario.seen, deal)


PRESETS = with_oracle(
    {
        "synthetic-scm": SyntheticSCM(),
        "synthetic-scm-common": SyntheticSCM(common_shortcut=SHORTCUT_MEAN, unseen=500, test_samples=20),
    }
)
