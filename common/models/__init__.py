"""Models: their settings, how they are built, and the one resident network that runs them. No training."""
