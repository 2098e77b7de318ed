"""Local training, server half: says when to train, and sends and receives no model."""

from common.methods.local import Local
from common.models import Tensors
from strategies.base import MethodStrategy
from strategies.exchange import Payload


class LocalStrategy(MethodStrategy[Local]):
    """Nothing is aggregated; the global arrays stay as they were."""

    def payload(self, model: Tensors) -> Payload:
        return {}
