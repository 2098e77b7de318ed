"""What is asked of a SuperLink again, beyond what Flower asks again."""

import time
from logging import WARNING

from perennial.common.flower.names import RetryInvoker, RetryState, log

PATIENCE = 60.0
"""Seconds for which a call is repeated that the SuperLink has failed by its own fault."""
WRONG_TIME = "Invalid timestamp"
"""What a SuperLink says to a signature of another time than its own."""
NOT_NOW = (
    "perennial: the SuperLink takes nothing that is signed at %s UTC, which this machine's clock says; it may be "
    "5 seconds ahead of the server's, or 5 minutes behind, so set the clock"
)


def persist(invoker: RetryInvoker) -> RetryInvoker:
    """Have an invoker of Flower's repeat, for `PATIENCE` seconds, also what fails inside the SuperLink.

    On a busy machine SQLite's file can be locked for longer than the five seconds that Flower waits for it. Flower
    then drops the call, and a site's reply with it. What it says of a clock, Flower's SuperNode keeps to itself.
    """
    gives_up, on_success, since = invoker.should_giveup, invoker.on_success, list[float]()

    def should_giveup(error: Exception) -> bool:
        code = getattr(error, "code", None)
        if code and WRONG_TIME in str(getattr(error, "details", str)()):
            log(WARNING, NOT_NOW, time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()))
        if code and code().name == "INTERNAL":
            since.append(time.monotonic())
            return since[-1] - since[0] > PATIENCE
        return gives_up is not None and gives_up(error)

    def succeeded(state: RetryState) -> None:
        since.clear()
        if on_success:
            on_success(state)

    invoker.should_giveup, invoker.on_success = should_giveup, succeeded
    return invoker
