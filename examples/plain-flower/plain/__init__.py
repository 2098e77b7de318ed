"""FedIIR of Perennial in a plain Flower app: your ServerApp, your model, your data."""
