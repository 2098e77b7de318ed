"""The resident executor: one process per site that answers what its SuperNode takes in, with installed code.

    python -m perennial.client.node.executor PARENT HOST:PORT FOLDER [MODULE...]

`supernode.py`, the process PARENT, starts it, and again when it ends. It stays, with PyTorch, data and models
loaded. What it says to the SuperNode, and keeps in FOLDER, is in `common/flower/executor.py`.
"""

import os
import signal
import sys
import threading
import time
from logging import INFO
from pathlib import Path

from perennial.common.flower.executor import serve
from perennial.common.flower.names import log
from perennial.common.flower.processes import LOOK_EVERY, quote_in_line


def end_with_parent(parent: int) -> None:
    """From now on, this process ends with its parent, and at once: a training for nobody is left where it is.

    The parent is known by the id that it has given, because it may have ended while Flower was imported here.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Load what a message needs, then serve."""
    end_with_parent(int(sys.argv[1]))
    quote_in_line()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the SuperNode, with which this ends
    from perennial.client.node.installed import answer, audit

    log(INFO, "perennial: executor %d is ready", os.getpid())
    serve(sys.argv[2], Path(sys.argv[3]), answer, audit)


if __name__ == "__main__":
    main()
