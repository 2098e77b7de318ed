"""The two ways in which a run ends early, and what may stand in a sentence."""

import os
import re
import traceback
from collections.abc import Sequence

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)?")
"""A terminal's commands: colours, the cursor, the window's title."""


LONGEST = 2000
"""Letters of what another machine is told, of which it keeps each."""


def printable(text: str) -> str:
    """A text that somebody else may have written, as one line without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in ESCAPES.sub("", text))


def some_of(sentences: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    more = [f"and {len(sentences) - 3} more"] if len(sentences) > 3 else []
    return "; ".join([*sentences[:3], *more])


class UserError(Exception):
    """Something the user can put right; the command line shows it as one sentence and exits with 2."""

    def __init__(self, sentence: str, told: str = "") -> None:
        """`told` is what another machine is told, where the sentence itself says what is in somebody's files."""
        super().__init__(printable(sentence))
        self.told = printable((told or sentence)[:LONGEST])


class RunStopped(Exception):  # noqa: N818 - a state of the run, not a fault of the program
    """The run cannot go on (too few clients answered); the last checkpoint stands. Exit code 3."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence))


class Stop(Exception):  # noqa: N818 - a wish, not a fault
    """Raised by who watches a run: it ends after this round, with an evaluation, a checkpoint and a summary."""


class PlugInError(UserError):
    """What a plug-in's code raised, in words."""


def in_words(error: BaseException) -> str:
    """An exception's type, and its text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")


def told_with_place(error: BaseException, caller: str) -> str:
    """An exception's type and text, and where in somebody's own code, called from the file `caller`, it arose."""
    ours = ("importlib", f"{os.sep}torch{os.sep}", caller)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(own in f.filename for own in ours)]
    file, line = (frames[-1].filename, frames[-1].lineno) if frames else ("", 0)
    text = str(error)
    if isinstance(error, SyntaxError):
        file, line, text = error.filename or "", error.lineno, error.msg
    text = " ".join(text.split())[:300]
    return f"{type(error).__name__}{text and f': {text}'}{f' ({file}, line {line})' if file else ''}"


def out_of_memory(error: BaseException) -> bool:
    """Python's own, and PyTorch's of any device, which are not imported for this."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "not enough memory" in str(error)


def from_outside(error: BaseException) -> bool:
    """Whether an exception is the machine's, of its disk or memory, or what some library has made of Ctrl-C."""
    if (isinstance(error, OSError) and error.strerror) or out_of_memory(error):
        return True
    cause: BaseException | None = error
    while cause and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__context__
    return cause is not None
