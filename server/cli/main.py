"""The command line: `perennial run | resume | watch | demo | list | show | sweep | compare | report | …`."""

import sys

try:
    import typer

    from perennial.server.cli.console import heed_interrupts, sentences

    # In the order of `perennial --help`.
    # isort: off
    from perennial.server.cli import run, watch, demo, show, study, plugins, sites, export  # noqa: F401
    from perennial.server.cli.options import app
except KeyboardInterrupt:  # these imports take half a second
    print("perennial: interrupted", file=sys.stderr)
    sys.exit(130)


def main() -> None:
    """Entry point of the `perennial` command."""
    heed_interrupts()
    try:
        with sentences():  # what a command raises outside of its own
            app()
    except typer.Exit as end:
        sys.exit(end.exit_code)
