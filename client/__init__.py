"""What a client does with a message: training, objectives. It imports neither `strategies/` nor `server/`."""
