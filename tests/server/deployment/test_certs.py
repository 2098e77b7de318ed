"""`perennial certs`: files that Flower reads, that only their owner reads, and that keep strangers out."""

import errno
import os
import stat
from ipaddress import ip_address
from pathlib import Path
from queue import Queue

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication
from grpc_listener import listening
from typer.testing import CliRunner, Result

from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.deployment import certs

ENDS = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["certs", *arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployment") / "certs"
    arguments = ["--sites", "2", "--host", "server.example", "--host", "192.0.2.7", "--days", "30"]
    assert call(str(folder), *arguments).exit_code == 0
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_flower_reads_the_site_keys(made: Path) -> None:
    class Arguments:
        auth_supernode_private_key = str(made / "sites" / "site-1")
        auth_supernode_public_key = None

    private, public = _try_setup_client_authentication(Arguments)  # type: ignore[arg-type, misc]
    assert private.curve.name == "secp384r1"
    assert public_key_to_bytes(public) == try_load_public_key(made / "sites" / "site-1.pub")
    assert try_load_public_key(made / "sites" / "site-1.pub") != try_load_public_key(made / "sites" / "site-2.pub")


def test_names_and_dates_of_the_server_certificate(made: Path) -> None:
    certificate = x509.load_pem_x509_certificate((made / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "superlink", "server.example"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("127.0.0.1"), ip_address("192.0.2.7")]
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 30
    ca = x509.load_pem_x509_certificate((made / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(ca)


def test_only_the_owner_reads_what_is_secret(made: Path) -> None:
    modes = {str(path.relative_to(made)): stat.S_IMODE(path.stat().st_mode) for path in made.rglob("*")}
    public = {"ca.crt", "server.crt", "sites/site-1.pub", "sites/site-2.pub"}
    secret = {"ca.key", "server.key", "superexec.secret", "sites/site-1", "sites/site-2"}
    assert modes.pop("sites") == stat.S_IMODE(made.stat().st_mode) == 0o700
    assert modes == dict.fromkeys(public, 0o644) | dict.fromkeys(secret, 0o600)
    assert len((made / "superexec.secret").read_bytes()) >= 48


def test_every_file_is_explained_and_the_next_commands_are_told(tmp_path: Path) -> None:
    shown = call(str(tmp_path / "new"), "--name", "north", "--name", "south").stdout
    for word in (
        "ca.key",
        "superexec.secret",
        "north, south",
        "perennial register",
        "perennial join",
        "superlink",
    ):
        assert word in shown
    assert {path.name for path in (tmp_path / "new" / "sites").glob("*.pub")} == {"north.pub", "south.pub"}


def test_nothing_is_overwritten(made: Path, tmp_path: Path) -> None:
    before = files(made)
    (tmp_path / "file").touch()
    attempts = [
        (made, ["--sites", "2"], "--add"),
        (made, ["--add", "--name", "site-1"], "site-1"),
        (made, ["--add", "--name", "new", "--host", "new.example"], "--host new.example is not possible: "),
        (tmp_path / "file", ["--sites", "1"], "file"),
        (tmp_path / "nowhere", ["--sites", "1", "--add"], "ca.key"),
    ]
    for folder, arguments, word in attempts:
        result = call(str(folder), *arguments)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
        assert word in result.stderr
    assert files(made) == before
    assert not (tmp_path / "nowhere").exists()


def test_a_server_certificate_does_not_outlive_its_ca(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    for days in ("3651", "5000", "3000000", "99999999999"):
        result = call(str(folder), "--sites", "1", "--days", days)
        assert result.exit_code == 2
        assert (
            f"--days {days} is not possible: the CA is valid for 3650 days more; write 1 to 3650" in result.stderr
        )
        assert not folder.exists()
    assert call(str(folder), "--sites", "1", "--days", "3650").exit_code == 0
    ca, server = (
        x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.crt", "server.crt")
    )
    assert server.not_valid_after_utc <= ca.not_valid_after_utc


@pytest.mark.parametrize(
    ("left", "words"), [(5, "valid for 5 days more; write 1 to 5"), (0, "only; make a new folder")]
)
def test_a_renewed_server_certificate_does_not_outlive_an_old_ca(left: int, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs.make(folder, 1, [], 1)
    key = certs._load_authority(folder)[1]
    (folder / "ca.crt").write_bytes(certs.authority(key, left).public_bytes(Encoding.PEM))
    (folder / "server.crt").unlink()
    (folder / "server.key").unlink()
    before = files(folder)
    result = call(str(folder), "--sites", "1", "--add", "--days", "30")
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert files(folder) == before
    if left > 0:
        assert call(str(folder), "--sites", "1", "--add", "--days", "5").exit_code == 0


@pytest.mark.parametrize("there", [False, True])
def test_all_files_are_written_or_none(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "certs"
    if there:
        folder.mkdir(parents=True)
    before, original = sorted(tmp_path.rglob("*")), os.open

    def full(path: Path, *rest: int) -> int:
        if str(path).endswith("site-2.pub"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, *rest)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(UserError, match=r"certs cannot be written \(No space left on device\); nothing was made"):
        certs.make(folder, 2, [], 1)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.undo()
    certs.make(folder, 1, [], 1)
    kept = files(folder)
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(UserError, match="nothing was made"):
        certs.make(folder, ["new", "site-2"], [], 1, add=True)
    assert files(folder) == kept


def test_sites_are_added_and_a_server_certificate_is_renewed(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    call(str(folder), "--sites", "2")
    before = files(folder)
    assert "site-3" in call(str(folder), "--sites", "1", "--add").stdout
    after = files(folder)
    assert after.keys() - before.keys() == {"sites/site-3", "sites/site-3.pub"}
    assert {name: after[name] for name in before} == before

    for name in ("server.crt", "server.key"):
        (folder / name).unlink()
    assert call(str(folder), "--sites", "0", "--add", "--host", "new.example").exit_code == 0
    renewed = files(folder)
    assert {name for name in after if renewed[name] != after[name]} == {"server.crt", "server.key"}
    assert b"new.example" in x509.load_pem_x509_certificate(renewed["server.crt"]).tbs_certificate_bytes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--sites", "--name"]),
        (["--sites", "2", "--name", "a"], ["--sites", "--name"]),
        (["--name", "a", "--name", "a"], ["'a'", "twice"]),
        (["--name", "../a"], ["'../a'", "letters"]),
        (["--name", "a.pub"], ["'a.pub'"]),
        (["--sites", "1", "--host", "https://server"], ["--host", "https://server", "superlink.example"]),
    ],
)
def test_a_sentence_and_no_file(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    result = call(str(tmp_path / "new"), *arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "server.example"])
def test_grpc_trusts_the_server_with_this_ca_alone(made: Path, tmp_path: Path, name: str) -> None:
    call(str(tmp_path / "other"), "--sites", "0")
    dialled = [("grpc.ssl_target_name_override", name)]
    with listening(made) as port:

        def ready(ca: Path, options: list[tuple[str, str]]) -> bool:
            credentials = grpc.ssl_channel_credentials(ca.read_bytes())
            with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
                states: Queue[grpc.ChannelConnectivity] = Queue()
                channel.subscribe(states.put, try_to_connect=True)
                while (state := states.get(timeout=60)) not in ENDS:
                    pass
                return state is grpc.ChannelConnectivity.READY

        assert ready(made / "ca.crt", dialled)
        assert not ready(tmp_path / "other" / "ca.crt", dialled)
        assert not ready(made / "ca.crt", [("grpc.ssl_target_name_override", "elsewhere.example")])
