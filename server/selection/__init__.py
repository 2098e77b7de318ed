"""From a run's rows to its summary: which round is chosen, by rules over rows alone."""
