"""What came of a run, as objects, tables, files and figures. Nothing here starts a run."""
