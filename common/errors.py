"""The two ways in which a run ends early."""


class UserError(Exception):
    """Something the user can put right; the command line shows it as one sentence and exits with 2."""


class RunStopped(Exception):  # noqa: N818 - a state of the run, not a fault of the program
    """The run cannot go on (too few clients answered); the last checkpoint stands. Exit code 3."""
