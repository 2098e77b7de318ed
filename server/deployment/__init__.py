"""Runs on Flower's own processes: keys, submitting, following. What Flower may change is in `common/flower/`."""
