"""Generated data in which two causes and a shortcut tell the label, with strengths that are set."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Agreeing, Probability, with_oracle
from perennial.common.data.scenarios.colored import TWO_LEVELS
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import torch_generator

if TYPE_CHECKING:
    from torch import Tensor
WIDTH = 4
"""Features of a cause or of the shortcut."""
COMMON, PERSONAL, SHORTCUT = slice(0, WIDTH), slice(WIDTH, 2 * WIDTH), slice(2 * WIDTH, 3 * WIDTH)
"""Which of the 12 features are which."""


class CausesAndShortcut(Agreeing):
    """A linear structural model with one cause that all share, one of each client's own, and a shortcut.

    The label y is -1 or 1, equally likely, and the bit c equals it with the environment's probability p. Each of
    three blocks of `WIDTH` features is N(m u, I) with the unit vector u of equal entries: m = y · `common` at all
    clients, m = ± y · `personal` with a sign of the client's own, and m = c · `shortcut`. So the causes alone are
    right in Φ(√(common² + personal²)) of all cases at best, and without the client's own in Φ(common). A client's
    test environments are the same samples, with c and its features drawn anew for each p. Under `oracle` the
    shortcut's features are zero.
    """

    title = "linear model with a common cause, a cause of each client's own sign, and a shortcut"
    source = "ours, after the assumptions of PerInvFL §3 and of Tang 2025 §4.3 and §5.3"
    dataset = "generated"
    test_agreement = tuple(tenths / 10 for tenths in range(11))

    name: Literal["causes-and-shortcut"] = "causes-and-shortcut"
    clients: int = knob(
        8, "number of clients; the sign changes once each environment has had one, so that all have both",
        symbol="N", ge=2, le=100_000,
    )  # fmt: skip
    train_agreement: tuple[Probability, ...] = knob(
        (0.95, 0.65), "P(shortcut agrees with the label) in each training environment", symbol="p^e",
        min_length=1, max_length=100,
    )  # fmt: skip
    environments_per_client: int = knob(
        1, "training environments of a client, evenly spread: with 2 of four, client i has i and i + 2",
        ge=1, le=100,
    )  # fmt: skip
    common: float = knob(0.7, "half the distance of the two classes in the cause of all", ge=0, le=10)
    personal: float = knob(0.7, "half the distance of the two classes in the client's own cause", ge=0, le=10)
    shortcut: float = knob(2.0, "half the distance of the shortcut's two values", ge=0, le=10)
    train_samples: int = knob(600, "training and validation samples of a client", ge=2, le=1_000_000)
    test_samples: int = knob(200, "test samples of a client", ge=1, le=100_000)
    validation_fraction: float = knob(
        0.3, "part of a client's own training data that is held out for validation", ge=0, lt=1
    )

    @property
    def drawn_samples(self) -> int:
        return self.train_samples + self.test_samples * len(self.test_environments)

    @property
    def rounds(self) -> int:
        return 100

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (WIDTH,), "linear_features": True}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (3 * WIDTH,)

    def environments(self, client: int) -> tuple[int, ...]:
        """The training environments of a client."""
        count = len(self.train_agreement)
        each = self.environments_per_client
        return tuple(sorted({(client + step * count // each) % count for step in range(each)}))

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        client_id, own = self.client_ids[client], self.environments(client)
        sign = 1 - 2 * (client // len(self.train_agreement) % 2)

        def samples(split: str, labels: "Tensor", p: "Tensor", environment: "Tensor", *key: str) -> Examples:
            """With causes that depend on the split alone, and a shortcut that depends on the key, too."""
            y = 2.0 * labels - 1
            z = torch.randn(len(y), 3 * WIDTH, generator=torch_generator(seed, client_id, split, "causes"))
            z[:, COMMON] += y[:, None] * self.common / WIDTH**0.5
            z[:, PERSONAL] += sign * y[:, None] * self.personal / WIDTH**0.5
            generator = torch_generator(seed, client_id, split, "shortcut", *key)
            c = torch.where(torch.rand(len(y), generator=generator) < p, y, -y)
            noise = torch.randn(len(y), WIDTH, generator=generator)
            z[:, SHORTCUT] = 0 if self.oracle else noise + c[:, None] * self.shortcut / WIDTH**0.5
            return Examples(z, labels, environment)

        def labels(split: str, count: int) -> "Tensor":
            return torch.randint(2, (count,), generator=torch_generator(seed, client_id, split, "labels"))

        def dealt(split: str, count: int) -> Examples:
            """Sample by sample to the client's environments in turn."""
            environment = torch.tensor(own)[torch.arange(count) % len(own)]
            p = torch.tensor(self.train_agreement)[environment]
            return samples(split, labels(split, count), p, environment)

        held_out = round(self.validation_fraction * self.train_samples)
        test = labels("test", self.test_samples)
        return ClientData(
            dealt("train", self.train_samples - held_out),
            dealt("validation", held_out),
            {
                name: samples("test", test, torch.full((len(test),), p), torch.full_like(test, -1), name)
                for name, p in zip(self.test_environments, self.test_agreement, strict=True)
            },
        )


PRESETS = with_oracle(
    {
        "causes-and-shortcut": CausesAndShortcut(),
        "causes-and-shortcut-2env": CausesAndShortcut(train_agreement=TWO_LEVELS, environments_per_client=2),
    }
)
