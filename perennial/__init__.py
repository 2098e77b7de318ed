"""Federated learning for clients whose data differ from each other and from what they will meet after training."""

__version__ = "0.1.0"
