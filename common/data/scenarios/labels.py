"""Generated data with several labels, each with a cause and a shortcut."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Agreeing, Probability, drawn_data, with_oracle
from perennial.common.tasks import Labels
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import torch_generator

if TYPE_CHECKING:
    from torch import Tensor

FREQUENCIES = {"common": 0.5, "frequent": 0.3, "rare": 0.1}
"""How often a sample has each label."""
WIDTH = 2
"""Features of a label's cause."""
CAUSES = len(FREQUENCIES) * WIDTH
"""Features of all causes, label after label; behind them is one feature for each label's shortcut."""


class LabelsAndShortcut(Agreeing):
    """Three labels that a sample has or has not, independently, of which some are not known.

    For each label, with v = 1 where a sample has it and −1 where not: its cause is two features N(`cause` v u, I)
    with the unit vector u of equal entries, and its shortcut one feature N(`shortcut` c, 1) with a bit c that
    equals v with the environment's probability p. So the cause alone has an area under the ROC curve of
    Φ(√2 · cause). A client's test environments are the same samples, with c and the shortcut drawn anew. Under
    `oracle` the shortcuts are zero.
    """

    title = "three labels, each with a cause and a shortcut, some of them not known"
    source = "ours"
    dataset = "generated"
    test_agreement = (0.0, 0.25, 0.5, 0.75, 1.0)
    classes: ClassVar[int] = 0

    name: Literal["labels-and-shortcut"] = "labels-and-shortcut"
    clients: int = knob(8, "number of clients", symbol="N", ge=2, le=100_000)
    train_agreement: tuple[Probability, ...] = knob(
        (0.95, 0.65), "P(a shortcut agrees with its label) in each training environment", symbol="p^e",
        min_length=1, max_length=100,
    )  # fmt: skip
    missing: float = knob(0.1, "P(a label of a sample is not known), in training and test alike", ge=0, lt=1)
    cause: float = knob(0.7, "half the distance of samples with and without a label in its cause", ge=0, le=10)
    shortcut: float = knob(1.5, "half the distance of the shortcut's two values", ge=0, le=10)
    train_samples: int = knob(400, "training and validation samples of a client", ge=2, le=1_000_000)
    test_samples: int = knob(200, "test samples of a client", ge=1, le=100_000)
    validation_fraction: float = knob(
        0.25, "part of a client's own training data that is held out for validation", ge=0, lt=1
    )

    @property
    def drawn_samples(self) -> int:
        return self.train_samples + self.test_samples * len(self.test_environments)

    @property
    def task(self) -> Labels:
        return Labels(tuple(FREQUENCIES))

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (8,)}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (CAUSES + len(FREQUENCIES),)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        client_id, own = self.client_ids[client], client % len(self.train_agreement)

        def draw(split: str, count: int, p: float, environment: int, *key: str) -> Examples:
            """With labels and causes that depend on the split alone, and shortcuts on the key, too."""
            generator = torch_generator(seed, client_id, split, "causes")
            frequencies = torch.tensor(list(FREQUENCIES.values()))
            y = (torch.rand(count, len(frequencies), generator=generator) < frequencies).float()
            v = 2 * y - 1
            causes = torch.randn(count, CAUSES, generator=generator)
            causes += self.cause * v.repeat_interleave(WIDTH, dim=1) / WIDTH**0.5
            unknown = torch.rand(count, len(frequencies), generator=generator) < self.missing
            shortcuts = torch.zeros_like(v) if self.oracle else self._shortcuts(v, p, seed, client_id, split, *key)
            x = torch.cat([causes, shortcuts], dim=1)
            return Examples(x, y.masked_fill(unknown, torch.nan), torch.full((count,), environment))

        return drawn_data(
            draw,
            train_samples=self.train_samples,
            validation_fraction=self.validation_fraction,
            test_samples=self.test_samples,
            own=(self.train_agreement[own], own),
            tests=dict(zip(self.test_environments, self.test_agreement, strict=True)),
        )

    def _shortcuts(self, v: "Tensor", p: float, seed: int, *key: str) -> "Tensor":
        import torch

        generator = torch_generator(seed, *key, "shortcut")
        c = torch.where(torch.rand(v.shape, generator=generator) < p, v, -v)
        return self.shortcut * c + torch.randn(v.shape, generator=generator)


PRESETS = with_oracle({"labels-and-shortcut": LabelsAndShortcut()})
