"""Local training, server half: says when to train, and sends and receives no model."""

from perennial.common.methods.local import Local
from perennial.common.utils.tensors import Tensors
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import Payload


class LocalStrategy(MethodStrategy[Local]):
    """Nothing is aggregated; the global arrays stay as they were."""

    def payload(self, model: Tensors) -> Payload:
        return {}
