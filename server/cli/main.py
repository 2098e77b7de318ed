"""The command line: `perennial run | resume | list | show | sweep | compare | reproduce | report | certs | …`."""

# In the order of `perennial --help`.
# isort: off
from server.cli import run, show, study, sites  # noqa: F401
from server.cli.options import app


def main() -> None:
    """Entry point of the `perennial` command."""
    app()
