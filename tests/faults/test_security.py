"""Who has not the right CA, the right key or TLS at all does not get in, and is told in a sentence."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from perennial.common.flower.processes import environment, free_port, program
from perennial.server.deployment.certs import make
from perennial.server.deployment.submission import await_port

pytestmark = [pytest.mark.runtimes, pytest.mark.faults]


@dataclass
class Secure:
    """A SuperLink with TLS and node authentication, and what `perennial` and others say to it."""

    folder: Path
    fleet: int
    control: int

    def perennial(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", "from perennial.server.cli.main import main; main()", *arguments]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def join(self, *arguments: object) -> "subprocess.Popen[str]":
        """A site joins; it has client 0's part of whatever scenario is run."""
        place = [
            "--superlink",
            f"127.0.0.1:{self.fleet}",
            "--partition",
            "0",
            "--state",
            str(self.folder / "state"),
        ]
        return self.perennial("join", *place, *map(str, arguments))

    def control_of(self, *arguments: str) -> str:
        """A command of the operator; what it says."""
        place = ["--superlink", f"127.0.0.1:{self.control}", "--ca", str(self.folder / "certs" / "ca.crt")]
        done = self.perennial(*arguments, *place)
        return done.communicate(timeout=120)[0]


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    certs = folder / "certs"
    make(certs, 2, [], days=1)
    make(folder / "others", 1, [], days=1)
    fleet, control = free_port(), free_port()
    tls = ["ca-certfile", certs / "ca.crt", "certfile", certs / "server.crt", "keyfile", certs / "server.key"]
    flags = [f"--ssl-{tls[i]}={tls[i + 1]}" for i in (0, 2, 4)] + [
        f"--appio-ssl-{tls[i]}={tls[i + 1]}" for i in (0, 2, 4)
    ]
    command = [
        program("flower-superlink"), *flags, "--enable-supernode-auth", "--isolation", "process",
        "--superexec-auth-secret-file", str(certs / "superexec.secret"),
        "--fleet-api-address", f"127.0.0.1:{fleet}", "--control-api-address", f"127.0.0.1:{control}",
        "--serverappio-api-address", f"127.0.0.1:{free_port()}",
    ]  # fmt: skip
    with (folder / "superlink.log").open("w") as log:
        link = subprocess.Popen(command, env=environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        await_port(control, link, folder / "superlink.log")
        yield Secure(folder, fleet, control)
    finally:
        link.kill()
        link.wait()


def test_a_site_with_the_wrong_ca_key_or_protection_ends_with_a_sentence(secure: Secure) -> None:
    ca, key = secure.folder / "certs" / "ca.crt", secure.folder / "certs" / "sites" / "site-1"
    other = secure.folder / "others" / "ca.crt"
    attempts = [
        (("--ca", other, "--key", key), f"has a certificate that {other} does not vouch for"),
        (("--insecure",), "does not speak plaintext gRPC: give its CA with --ca FILE"),
        (("--ca", ca), "lets in registered sites alone: give the site's --key FILE"),
        (("--ca", ca, "--key", f"{key}.pub"), "is no private elliptic-curve key in OpenSSH's form"),
        (("--ca", ca, "--key", ca), "is no private elliptic-curve key in OpenSSH's form"),
    ]
    joining = [secure.join(*arguments) for arguments, _ in attempts]
    for process, (_, sentence) in zip(joining, attempts, strict=True):
        said = process.communicate(timeout=180)[0]
        print(said)
        assert process.returncode == 2
        assert sentence in said
        assert "Traceback" not in said


def test_a_key_that_is_not_registered_waits_until_it_is(secure: Secure) -> None:
    """The SuperLink's answer to an unknown key and to a session that has not expired is the same."""
    certs = secure.folder / "certs"
    process = secure.join("--ca", certs / "ca.crt", "--key", certs / "sites" / "site-1")
    assert process.stdout
    lines: list[str] = []
    registered = False
    for line in process.stdout:
        lines.append(line)
        if "does not take this key" in line:
            assert "this key is not registered (perennial register NAME.pub)" in line
            assert "site-1: " in secure.control_of("register", str(certs / "sites" / "site-1.pub"))
            registered = True
        if "connected to" in line:
            break
    process.terminate()
    print(*lines, process.communicate(timeout=60)[0])
    assert registered
    assert "connected to" in lines[-1]
