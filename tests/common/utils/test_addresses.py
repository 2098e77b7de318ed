"""Whether a SuperLink can be spoken to: each way in which it cannot has its sentence."""

import socket
import struct
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer
from threading import Thread
from typing import Any

import pytest
from grpc_listener import listening

from perennial.common.utils.addresses import Address, Unreachable, must_answer, must_be_protected
from perennial.common.utils.errors import UserError
from perennial.server.deployment.certs import make


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make(folder / "ours", 0, [], days=1)
    make(folder / "other", 0, [], days=1)
    return folder


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("superlink:9093", "superlink", 9093), ("192.0.2.7:1", "192.0.2.7", 1), ("[::1]:65535", "::1", 65535)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert str(Address(host, port)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("superlink", ":9093", "superlink:", "superlink:0", "a:65536", "a:x", "http://a:1"),
        *("server..example:1", ".example:1", f"{'a' * 64}:1", "\udcff:1", f"a:{'9' * 5000}"),
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        Address.parse(text)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "::1"])
def test_plaintext_may_be_had_unasked_within_this_machine(host: str) -> None:
    must_be_protected(Address(host, 9093), None, insecure=False)


@pytest.mark.parametrize("host", ["superlink", "192.0.2.7", "localhost.example", "::2"])
def test_plaintext_to_another_machine_must_be_asked_for(host: str) -> None:
    with pytest.raises(UserError, match=r"--ca FILE.*--insecure"):
        must_be_protected(Address(host, 9093), None, insecure=False)
    must_be_protected(Address(host, 9093), None, insecure=True)
    must_be_protected(Address(host, 9093), Path("ca.crt"), insecure=False)


def test_not_both() -> None:
    with pytest.raises(UserError, match="leave out one"):
        must_be_protected(Address("localhost", 9093), Path("ca.crt"), insecure=True)


def test_what_is_as_it_should_be_passes(certs: Path) -> None:
    with listening() as port:
        must_answer(Address("127.0.0.1", port), None)
    with listening(certs / "ours") as port:
        must_answer(Address("127.0.0.1", port), certs / "ours" / "ca.crt")
        must_answer(Address("localhost", port), certs / "ours" / "ca.crt")


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"127.0.0.1:{port} cannot be reached: Connection refused"):
            must_answer(Address("127.0.0.1", port), None)


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(UserError, match=r"nowhere.invalid:9093 cannot be reached"):
        must_answer(Address("nowhere.invalid", 9093), None)


def test_somebody_who_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UserError, match="no answer"):
        must_answer(Address("127.0.0.1", silent.getsockname()[1]), None, seconds=0.1)


def test_wrong_ca_and_wrong_name(certs: Path) -> None:
    with listening(certs / "ours") as port, pytest.raises(UserError, match=r"other/ca.crt does not vouch for: "):
        must_answer(Address("127.0.0.1", port), certs / "other" / "ca.crt")
    with (
        listening(certs / "ours", "127.0.0.2") as port,
        pytest.raises(UserError, match=r"for: IP address mismatch"),
    ):
        must_answer(Address("127.0.0.2", port), certs / "ours" / "ca.crt")


def test_plaintext_against_tls_and_tls_against_plaintext(certs: Path) -> None:
    with listening(certs / "ours") as port, pytest.raises(UserError, match="give its CA with --ca"):
        must_answer(Address("127.0.0.1", port), None)
    with (
        listening() as port,
        pytest.raises(UserError, match=r"does not speak TLS but plaintext gRPC; .*say --insecure"),
    ):
        must_answer(Address("127.0.0.1", port), certs / "ours" / "ca.crt")


class Cuts(BaseRequestHandler):
    """Ends a connection at once, as a tunnel does whose server is not there yet."""

    said = b""
    abrupt = False

    def handle(self) -> None:
        if self.abrupt:  # a reset
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif self.said:
            self.request.recv(9)
            self.request.sendall(self.said)


@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "it ends each connection at once"),
        ({"abrupt": True}, "it ends each connection at once"),
        ({"said": b"HTTP/1.1 400 Bad Request\r\n\r\n"}, "what answers there does not speak (TLS|plaintext gRPC)"),
    ],
)
def test_a_connection_that_ends_says_nothing_of_the_settings(
    settings: dict[str, Any], reason: str, protected: bool, certs: Path
) -> None:
    with TCPServer(("127.0.0.1", 0), type("Cutting", (Cuts,), settings)) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        address = Address("127.0.0.1", server.server_address[1])
        with pytest.raises(Unreachable, match=rf"cannot be reached: {reason}$"):
            must_answer(address, certs / "ours" / "ca.crt" if protected else None)
        server.shutdown()


@pytest.mark.parametrize(
    ("days", "reason"), [(-3, "certificate has expired"), (3, "certificate is not yet valid")]
)
def test_a_certificate_s_dates_may_be_right_later(
    days: int, reason: str, certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is renewed, or the clock of this machine is set."""
    for name in ("ca.key", "ca.crt"):
        (tmp_path / name).write_bytes((certs / "ours" / name).read_bytes())

    class Elsewhen(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days)

    monkeypatch.setattr(f"{make.__module__}.datetime", Elsewhen)
    make(tmp_path, 0, [], days=1, add=True)
    sentence = rf"ca.crt does not vouch for: {reason} \(today is 20\d\d-\d\d-\d\d by this machine's clock\)$"
    with listening(tmp_path) as port, pytest.raises(Unreachable, match=sentence):
        must_answer(Address("127.0.0.1", port), tmp_path / "ca.crt")


def test_a_ca_that_is_none(certs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.crt: No such file"):
        must_answer(Address("127.0.0.1", 1), tmp_path / "nowhere.crt")
    with pytest.raises(UserError, match=r"superexec.secret is no certificate"):
        must_answer(Address("127.0.0.1", 1), certs / "ours" / "superexec.secret")
