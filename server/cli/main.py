"""The command line: `perennial run | resume | list | show | sweep | compare | reproduce | report | certs | …`."""

# isort: off - the order of these is that of the commands in `perennial --help`
from server.cli import run, show, sites, study  # noqa: F401
from server.cli.options import app


def main() -> None:
    """Entry point of the `perennial` command."""
    app()
