"""What a client does with a message: local training, objectives, kept state. It never imports `strategies/` or `server/`."""
