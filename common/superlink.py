"""Where a SuperLink is and whether it can be spoken to: one sentence for each way in which it cannot."""

import socket
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from perennial.common.errors import UserError

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What a gRPC client says first: the preface and an empty SETTINGS frame (RFC 9113, 3.4 and 6.5)."""
SETTINGS = 4


class Unreachable(UserError):  # noqa: N818 - a state that may pass
    """Nothing answers there, which may be over soon."""


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


def must_answer(address: Address, ca: Path | None, seconds: float = 10.0) -> None:
    """Open a connection, with TLS where a CA is given, and close it. Raises `UserError` when that fails."""
    context = _trusting(ca) if ca else None
    try:
        with socket.create_connection((address.host, address.port), timeout=seconds) as plain:
            if context:
                context.wrap_socket(plain, server_hostname=address.host).close()
                return
            plain.sendall(HTTP2)
            spoken = plain.recv(9)[3:4] == bytes([SETTINGS])
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"the SuperLink at {address} has a certificate that {ca} does not vouch for: "
            f"{error.verify_message.rstrip('.')}"
        ) from None
    except (ssl.SSLError, ConnectionResetError):
        spoken = False
    except OSError as error:
        reason = error.strerror or "no answer"
        raise Unreachable(f"the SuperLink at {address} cannot be reached: {reason}") from None
    if context and not spoken:
        raise UserError(f"the SuperLink at {address} does not speak TLS: leave out --ca and say --insecure")
    if not spoken:
        raise UserError(f"the SuperLink at {address} does not speak plaintext gRPC: give its CA with --ca FILE")


def _trusting(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError:
        raise UserError(f"--ca {ca} is no certificate in PEM form; give the ca.crt of `perennial certs`") from None
    except OSError as error:
        raise UserError(f"--ca {ca}: {error.strerror}") from None
