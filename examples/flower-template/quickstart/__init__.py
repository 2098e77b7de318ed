"""An app as Flower's PyTorch quickstart has it."""
