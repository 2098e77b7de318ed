"""Which release this package is, and what tells one state of its code from another."""

from functools import cache
from hashlib import sha256
from pathlib import Path

__version__ = "0.2.0"
PACKAGE = Path(__file__).parents[2]
"""The folder `perennial`, through whose links this module was imported."""


@cache
def code_digest() -> str:
    """12 hex digits over every source file of the package that this process runs."""
    digest = sha256()
    for path in sorted(PACKAGE.glob("*/**/*.py")) + sorted(PACKAGE.glob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
