"""One run: its round loop, its folder, and what is told while it goes."""
