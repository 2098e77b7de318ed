"""The client half of every method, in a file with the method's name, and what several of them share."""
