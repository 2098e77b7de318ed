"""Runs and what comes of them. The methods' server halves are in `strategies/`."""
