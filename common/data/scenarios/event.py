"""Generated data in which the time to an event follows from causes, and a shortcut from the time."""

from math import exp, log
from pathlib import Path
from typing import Any, ClassVar, Literal

from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Agreeing, Probability, drawn_data, with_oracle
from perennial.common.tasks import Event
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import torch_generator

TIMES = tuple(quarter / 4 for quarter in range(1, 11))
"""Ends of the intervals in which hazards are told."""
CAUSES, SHORTCUT = slice(0, 4), slice(4, 6)
"""Which of the 6 features are which."""
EARLY = log(2)
"""Before this time happens about every second event."""


class EventAndShortcut(Agreeing):
    """Times to an event with proportional hazards, some censored, and a shortcut that says which come early.

    Four features x ~ N(0, I) are the causes. The event has the hazard exp(`cause` · u·x) at any time, with the
    unit vector u of equal entries, and a sample is censored with the hazard `censoring`, which is announced. The
    shortcut is two features N(`shortcut` c u, I). The bit c is 1 for an event before ln 2 and −1 for others with
    the environment's probability p, and otherwise the reverse. A client's test environments are the same
    samples, with c and the shortcut drawn anew. Under `oracle` the shortcut's features are zero.
    """

    title = "time to an event with causes, censoring, and a shortcut that says which events come early"
    source = "ours"
    dataset = "generated"
    test_agreement = (0.0, 0.25, 0.5, 0.75, 1.0)
    classes: ClassVar[int] = 0

    name: Literal["event-and-shortcut"] = "event-and-shortcut"
    clients: int = knob(8, "number of clients", symbol="N", ge=2, le=100_000)
    train_agreement: tuple[Probability, ...] = knob(
        (0.95, 0.65), "P(the shortcut is right about what comes early) in each training environment", symbol="p^e",
        min_length=1, max_length=100,
    )  # fmt: skip
    censoring: float = knob(0.3, "hazard of being censored; that of the event is around 1", ge=0, le=10)
    cause: float = knob(1.0, "deviation of the logarithm of the event's hazard over samples", ge=0, le=10)
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
    def task(self) -> Event:
        return Event(TIMES, tuple(exp(-self.censoring * time) for time in TIMES))

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (8,)}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (SHORTCUT.stop,)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        client_id, own = self.client_ids[client], client % len(self.train_agreement)

        def draw(split: str, count: int, p: float, environment: int, *key: str) -> Examples:
            """With causes and times that depend on the split alone, and a shortcut on the key, too."""
            generator = torch_generator(seed, client_id, split, "causes")
            x = torch.zeros(count, SHORTCUT.stop)
            x[:, CAUSES] = torch.randn(count, CAUSES.stop, generator=generator)
            hazard = (self.cause * x[:, CAUSES].sum(dim=1) / CAUSES.stop**0.5).exp()
            waits = torch.empty(2, count).exponential_(generator=generator)
            time, censored = waits[0] / hazard, waits[1] / self.censoring  # inf: never censored
            y = torch.stack([torch.minimum(time, censored), (time <= censored).float()], dim=1)
            if not self.oracle:
                shortcut = torch_generator(seed, client_id, split, "shortcut", *key)
                right = torch.rand(count, generator=shortcut) < p
                c = torch.where((time < EARLY) == right, 1.0, -1.0)
                noise = torch.randn(count, 2, generator=shortcut)
                x[:, SHORTCUT] = self.shortcut * c[:, None] / 2**0.5 + noise
            return Examples(x, y, torch.full((count,), environment))

        return drawn_data(
            draw,
            train_samples=self.train_samples,
            validation_fraction=self.validation_fraction,
            test_samples=self.test_samples,
            own=(self.train_agreement[own], own),
            tests=dict(zip(self.test_environments, self.test_agreement, strict=True)),
        )


PRESETS = with_oracle({"event-and-shortcut": EventAndShortcut()})
