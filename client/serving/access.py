"""Who may call: bearer tokens, each with a name, in a file that is read anew when it changes."""

import hmac
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import grpc

from perennial.client.serving.messages import Refused
from perennial.common.utils.errors import UserError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
"""The letters of a bearer token (RFC 6750, section 2.1)."""
SCHEME = "bearer "


def read_tokens(path: Path) -> dict[str, bytes]:
    """SHA-256 of each token, by its name, from lines `NAME TOKEN`. Raises `UserError`, which quotes no token."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"--token-file {path} cannot be read ({reason})") from None
    found: dict[str, bytes] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"--token-file {path} line {number}"
        if len(words) != 2 or not NAME.fullmatch(words[0]) or not TOKEN.fullmatch(words[1]):
            raise UserError(
                f"{where} is not NAME TOKEN: a name of letters, digits, '.', '_', '-', then a token of 16 to 512 "
                "letters, digits and '-._~+/='"
            )
        if words[0] in found:
            raise UserError(f"{where}: the name {words[0]!r} is there twice")
        found[words[0]] = sha256(words[1].encode()).digest()
    if not found:
        raise UserError(f"--token-file {path} has no token; write lines NAME TOKEN")
    return found


class Callers:
    """Lets in who shows a token of the file; everybody where there is no file."""

    def __init__(self, file: Path | None, say: Callable[[str], object]) -> None:
        """Raises `UserError` for a file that cannot be used."""
        self.file = file
        self.count: Callable[[], object] = lambda: None
        """Called for each who is not let in."""
        self._say, self._refused, self._last = say, 0, ""
        self._tokens: Mapping[str, bytes] = read_tokens(file) if file else {}
        self._seen = self._stamp()

    def name(self, authorization: str | None, peer: str) -> str:
        """Whose token the header `Authorization` has; empty where none is needed. Raises `Refused`.

        All tokens are compared, each in constant time: how long it takes tells nothing about any of them.
        """
        if not self.file:
            return ""
        given = authorization or ""
        shown = given[len(SCHEME) :].strip() if given[: len(SCHEME)].lower() == SCHEME else ""
        digest = sha256(shown.encode(errors="replace")).digest()
        matches = [name for name, token in self._tokens.items() if hmac.compare_digest(token, digest)]
        if not matches:
            self._refused, self._last = self._refused + 1, peer
            self.count()
            sentence = "the token is none of this server's" if shown else "this server wants a token"
            raise Refused(
                grpc.StatusCode.UNAUTHENTICATED, f"{sentence}; send the header 'Authorization: Bearer TOKEN'"
            )
        return matches[0]

    def refresh(self) -> None:
        """Read the file again if it has changed, and say how many were not let in since the last look.

        If the file is gone or damaged, the tokens before stay.
        """
        if refused := self._refused:
            self._refused = 0
            calls = f"{refused} calls were" if refused > 1 else "a call was"
            self._say(f"{calls} not let in for want of a valid token, the last from {self._last}")
        if self.file and (stamp := self._stamp()) != self._seen:
            self._seen = stamp
            try:
                self._tokens = read_tokens(self.file)
                self._say(f"tokens were read anew: {', '.join(self._tokens)}")
            except UserError as error:
                self._say(f"{error}; the tokens before stay: {', '.join(self._tokens)}")

    def _stamp(self) -> tuple[int, ...]:
        try:
            status = self.file.stat() if self.file else None
        except OSError:
            status = None
        return (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size) if status else ()
