"""What everything else stands on: errors, files, draws, tensors by name. Imports nothing else of the project."""
