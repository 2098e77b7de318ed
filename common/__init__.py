"""What server and clients must agree on: configuration, wire format, models, metrics, data."""
