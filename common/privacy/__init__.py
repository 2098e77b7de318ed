"""What both sides know of privacy mechanisms: settings, what they promise, what travels."""
