"""What server and clients must agree on. Nothing of one side alone, and no import of a side."""
