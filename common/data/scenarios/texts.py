"""Generated sentences whose words say the class, and a planted word as the shortcut."""

from pathlib import Path
from typing import Any, Literal

from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Agreeing, Probability, drawn_data, with_oracle
from perennial.common.utils.knobs import knob
from perennial.common.utils.samples import PAD, SampleShape
from perennial.common.utils.seeding import torch_generator

TELLING, PLANTED, FILLING = 10, 2, 100
"""How many words are used for each class, may be the planted one, and mean nothing."""
VOCABULARY = 2 * TELLING + PLANTED + FILLING
TELLS = 3
"""Words of a sentence that are of a class."""


class PlantedWord(Agreeing):
    """Sentences of ids of words, with the label y in {0, 1} each with probability ½.

    A sentence has as many words as is drawn, `shortest` to `longest`. Three of them are of a class, each of y with
    probability `truth` and otherwise of the other class; one is the planted word, 0 or 1, which is y with the
    environment's probability p; all others mean nothing. Their order is drawn. A client's test environments are
    the same sentences with the planted word drawn anew. Under `oracle` it is a word that means nothing.
    """

    title = "generated sentences with telling words and a planted word as the shortcut"
    source = "ours"
    dataset = "generated"
    test_agreement = (0.0, 0.25, 0.5, 0.75, 1.0)

    name: Literal["planted-word"] = "planted-word"
    clients: int = knob(8, "number of clients", symbol="N", ge=2, le=100_000)
    train_agreement: tuple[Probability, ...] = knob(
        (0.95, 0.7), "P(the planted word is the label) in each training environment", symbol="p^e",
        min_length=1, max_length=100,
    )  # fmt: skip
    truth: float = knob(0.75, "probability that a telling word is of the label's class", ge=0.5, le=1)
    shortest: int = knob(6, "words of the shortest sentence", ge=TELLS + 1, le=1000)
    longest: int = knob(12, "words of the longest one", ge=TELLS + 1, le=1000)
    train_samples: int = knob(300, "training and validation samples of a client", ge=2, le=1_000_000)
    test_samples: int = knob(100, "test samples of a client", ge=1, le=100_000)
    validation_fraction: float = knob(
        0.2, "part of a client's own training data that is held out for validation", ge=0, lt=1
    )

    @property
    def drawn_samples(self) -> int:
        return self.train_samples + self.test_samples * len(self.test_environments)

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "embedding-bag"}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return SampleShape((max(self.longest, self.shortest),), VOCABULARY, padded=True)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        client_id, own = self.client_ids[client], client % len(self.train_agreement)
        (most,) = self.input_shape

        def draw(split: str, count: int, p: float, environment: int, *key: str) -> Examples:
            """With words and labels that depend on the split alone, and a planted word on the key, too."""
            words = torch_generator(seed, client_id, split, "words")
            y = torch.randint(2, (count,), generator=words)
            of = torch.where(torch.rand(count, TELLS, generator=words) < self.truth, y[:, None], 1 - y[:, None])
            telling = TELLING * of + torch.randint(TELLING, (count, TELLS), generator=words)
            filling = torch.randint(2 * TELLING + PLANTED, VOCABULARY, (count, most - TELLS), generator=words)
            lengths = torch.randint(min(self.shortest, most), most + 1, (count, 1), generator=words)
            order = torch.rand(count, most, generator=words)
            if not self.oracle:  # in the place of the first word that means nothing
                planted = torch_generator(seed, client_id, split, "planted", *key)
                right = torch.rand(count, generator=planted) < p
                filling[:, 0] = 2 * TELLING + torch.where(right, y, 1 - y)
            x = torch.cat([telling, filling], dim=1)
            places = torch.arange(most)
            order = order.masked_fill(places >= lengths, 2.0)
            # The first words, of which the telling ones are the first, stay, and their order is drawn.
            x = x.masked_fill(places >= lengths, PAD).gather(1, order.argsort(dim=1, stable=True))
            return Examples(x, y, torch.full((count,), environment))

        return drawn_data(
            draw,
            train_samples=self.train_samples,
            validation_fraction=self.validation_fraction,
            test_samples=self.test_samples,
            own=(self.train_agreement[own], own),
            tests=dict(zip(self.test_environments, self.test_agreement, strict=True)),
        )


PRESETS = with_oracle({"planted-word": PlantedWord()})
