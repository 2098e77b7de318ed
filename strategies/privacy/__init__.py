"""Privacy mechanisms in place of a method's own mean."""
