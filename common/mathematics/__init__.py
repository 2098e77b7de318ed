"""Pure mathematics that both halves of a method compute alike."""
