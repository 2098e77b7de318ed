"""Where a SuperLink is and whether it can be spoken to: one sentence for each way in which it cannot."""

import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

from perennial.common.utils.errors import UserError

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What a gRPC client says first: the preface and an empty SETTINGS frame (RFC 9113, 3.4 and 6.5)."""
SETTINGS = 4
DATES = (9, 10)
"""OpenSSL's codes for a certificate that is not valid yet, and for one that is not any more."""


class Unreachable(UserError):  # noqa: N818 - a state that may pass
    """Nothing that can be spoken with answers there, which may be over soon."""


class _Foreign(OSError):  # noqa: N818 - about the other side
    """What answers does not speak plaintext gRPC."""


@dataclass(frozen=True)
class Address:
    """A port of a machine, `HOST:PORT`."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, option: str = "--superlink", example: str = "superlink.example:9093") -> "Address":
        """Read `HOST:PORT` or `[IPV6]:PORT`, as an option has it. Raises `UserError`."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            host.encode("idna")  # as sockets do, also with a name in ASCII
            possible = host and "/" not in host and port.isascii() and port.isdigit() and 0 < int(port) < 65536
        except ValueError:
            possible = False
        if not possible:
            raise UserError(f"{option} {text!r} is no address; write HOST:PORT, e.g. {example}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether what is sent there stays on this machine."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def must_be_protected(address: Address, ca: Path | None, insecure: bool) -> None:
    """Raises `UserError` when neither TLS nor, beyond this machine, plaintext was asked for; or both were."""
    if ca and insecure:
        raise UserError("--ca asks for TLS and --insecure for plaintext; leave out one")
    if not ca and not insecure and not address.loopback:
        raise UserError(
            f"{address} is another machine: give --ca FILE for TLS, or --insecure to send everything in plaintext"
        )


def must_answer(address: Address, ca: Path | None, seconds: float = 10.0) -> float | None:
    """Open a connection, with TLS where a CA is given, and close it; when the certificate ends, in Unix time.

    Raises `UserError` when that fails; `Unreachable` where that may be over soon.
    """
    context, away = _trusting(ca) if ca else None, f"the SuperLink at {address} cannot be reached"
    try:
        return _spoken(address, context, seconds)
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message.rstrip(".")
        sentence = f"the SuperLink at {address} has a certificate that {ca} does not vouch for: {reason}"
        if error.verify_code in DATES:
            today = f"{datetime.now(UTC):%Y-%m-%d}"
            raise Unreachable(f"{sentence} (today is {today} by this machine's clock)") from None
        raise UserError(sentence) from None
    except (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError):
        reason = "it ends each connection at once"
    except (ssl.SSLError, _Foreign):
        reason = f"what answers there does not speak {'TLS' if ca else 'plaintext gRPC'}"
    except OSError as error:
        raise Unreachable(f"{away}: {error.strerror or 'no answer'}") from None
    # What it does speak has to be seen: whoever cuts connections must not get a site to give up TLS.
    with suppress(OSError):
        _spoken(address, None if ca else _trusting_all(), seconds)
        raise UserError(
            f"the SuperLink at {address} does not speak TLS but plaintext gRPC; if that is meant, leave out --ca "
            "and say --insecure"
            if ca
            else f"the SuperLink at {address} does not speak plaintext gRPC: give its CA with --ca FILE"
        )
    raise Unreachable(f"{away}: {reason}")


def ends_soon(address: Address, ends: float | None) -> str:
    """A sentence on a certificate that ends within 30 days; empty for another one."""
    if ends is None or ends - time.time() > 30 * 86400:
        return ""
    day = f"{datetime.fromtimestamp(ends, UTC):%Y-%m-%d}"
    return (
        f"the certificate of the SuperLink at {address} ends on {day}, and no site gets in after that; "
        "its operator makes a new one with `perennial certs DIR --add`"
    )


def _spoken(address: Address, context: ssl.SSLContext | None, seconds: float) -> float | None:
    """Speak with a server, in plaintext where there is no context; when its certificate ends. Raises `OSError`."""
    with socket.create_connection((address.host, address.port), timeout=seconds) as plain:
        if context:
            with context.wrap_socket(plain, server_hostname=address.host) as protected:
                ends = (protected.getpeercert() or {}).get("notAfter")
                return ssl.cert_time_to_seconds(str(ends)) if ends else None
        plain.sendall(HTTP2)
        heard = plain.recv(9)
    if not heard:
        raise ConnectionResetError
    if heard[3:4] != bytes([SETTINGS]):
        raise _Foreign
    return None


def _trusting_all() -> ssl.SSLContext:
    """To see whether there is TLS. Nothing is sent through it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _trusting(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError:
        raise UserError(f"--ca {ca} is no certificate in PEM form; give the ca.crt of `perennial certs`") from None
    except OSError as error:
        raise UserError(f"--ca {ca}: {error.strerror}") from None
