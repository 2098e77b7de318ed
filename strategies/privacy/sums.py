"""What the privacy mechanisms have in common: a server half that sees its method's `sums` alone."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from perennial.common.privacy.secure_aggregation import Summand, summands
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import Payload


class SummingStrategy(MethodStrategy[Any]):
    """Base of what stands before a method's own class (`strategies.registry`)."""

    def training(self) -> tuple[Payload, list[Summand]]:
        """What clients are sent to train, the same for all, and the parts of what comes back."""
        payload, expect = self.training_payload(self.sent), self.expect(self.sent)
        assert isinstance(payload, Mapping)  # of every method with `sums`
        assert isinstance(expect, Mapping)
        return payload, self.parts_of("train", payload, {**expect, **self.optional()})

    def parts_of(self, exchange: str, sent: Payload, like: Payload) -> list[Summand]:
        """The parts of what comes back in an exchange, where replies have records such as these."""
        return summands(self.hparams.summed(), exchange, self.hparams.terms(like, defaultdict(float)), sent)
