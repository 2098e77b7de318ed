"""What a client does with a message: training, objectives, state. It imports neither `strategies/` nor `server/`."""
