"""Keys and certificates of a deployment: a development CA, a server certificate, a key for each site."""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from perennial.common.utils.errors import UserError

Key = ec.EllipticCurvePrivateKey

HOSTS = ("localhost", "127.0.0.1", "superlink")
"""Every server certificate holds these: the machine itself, and the SuperLink's name in the compose files."""
CA_DAYS = 3650
SECRET, PUBLIC = 0o600, 0o644
"""Modes of files."""
USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HOST = re.compile(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def make(
    folder: Path, sites: Sequence[str] | int, hosts: Sequence[str], days: int, add: bool = False
) -> list[str]:
    """Write all files of a deployment; or, to `add`, what is not there yet. Returns the sites' names.

    A number of sites makes `site-1`, `site-2`, …, from the first that is free. No file is ever overwritten, and
    either all are written or none. Raises `UserError`.
    """
    if add and not (folder / "ca.key").is_file():
        raise UserError(
            f"{folder} has no ca.key; put it back for this command, or leave out --add to make all files anew"
        )
    if not add and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already and is not overwritten; name another folder, or say --add")
    names = _free_names(folder / "sites", sites) if isinstance(sites, int) else list(sites)
    _check_names(names, folder / "sites")
    entries = [_host(host) for host in dict.fromkeys((*HOSTS, *hosts))]

    files: dict[str, tuple[bytes, int]] = {}  # contents and modes
    if add:
        ca, ca_key = _load_authority(folder)
    else:
        ca_key = _new_key()
        ca = authority(ca_key, CA_DAYS)
        files["ca.key"] = _pem(ca_key), SECRET
        files["superexec.secret"] = secrets.token_urlsafe(48).encode(), SECRET
        files["ca.crt"] = ca.public_bytes(Encoding.PEM), PUBLIC
    if not (folder / "server.crt").exists():
        _check_days(days, ca)
        key = _new_key()
        files["server.key"] = _pem(key), SECRET
        files["server.crt"] = server(ca, ca_key, key, entries, days).public_bytes(Encoding.PEM), PUBLIC
    elif hosts:
        raise UserError(
            f"--host {hosts[0]} is not possible: {folder / 'server.crt'} is there already; to have a new one, "
            "move it and server.key away first"
        )
    for name in names:
        key = _new_key()
        files[f"sites/{name}"] = _pem(key, PrivateFormat.OpenSSH), SECRET
        line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        files[f"sites/{name}.pub"] = line + b"\n", PUBLIC
    _write_all(folder, files)
    return names


def public_keys(places: Sequence[Path]) -> list[Path]:
    """Files, and all `*.pub` of folders. Raises `UserError` for a folder without any."""
    found = []
    for place in places:
        if keys := sorted(place.glob("*.pub")) if place.is_dir() else [place]:
            found += keys
        else:
            raise UserError(f"{place} has no public key, no file NAME.pub")
    return found


def public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """A site's public key. Raises `UserError` for what is not one, `OSError` for what is not there."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{path} is no public key of a site; give a file sites/NAME.pub of `perennial certs`")
    return key


def authority(key: Key, days: int) -> x509.Certificate:
    """A self-signed CA that may sign servers, but no further CAs."""
    name = _name("Perennial development CA")
    return (
        _certificate(name, name, key.public_key(), _in(days), "key_cert_sign", "crl_sign")
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def server(
    ca: x509.Certificate, ca_key: Key, key: Key, hosts: Sequence[x509.GeneralName], days: int
) -> x509.Certificate:
    """A certificate for a server that is dialled under these names (its SANs); it ends no later than the CA."""
    until = min(_in(days), ca.not_valid_after_utc)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        _certificate(_name("Perennial SuperLink"), ca.subject, key.public_key(), until, "digital_signature")
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(signer, critical=False)
        .sign(ca_key, hashes.SHA384())
    )


def about(folder: Path, names: Sequence[str]) -> str:
    """What each file is for, and what to do next."""
    certificate = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = ", ".join(str(entry.value) for entry in alternatives)
    until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    first = names[0] if names else "SITE"
    return f"""\
{folder}/ca.crt            for every site and every command line (--ca); no secret
{folder}/ca.key            signs server certificates; keep it away from servers and sites
{folder}/server.crt, .key  for the SuperLink alone; valid until {until} for {hosts}
{folder}/superexec.secret  for the SuperLink and its SuperExec alone
{folder}/sites/NAME        for the site NAME alone (--key): {", ".join(names) or "none made"}
{folder}/sites/NAME.pub    registered once at the SuperLink; no secret

next, once the SuperLink runs:
  perennial register {folder}/sites/*.pub --superlink HOST:9093 --ca {folder}/ca.crt
and at each site:
  perennial join --superlink HOST:9092 --ca ca.crt --key {first} --data PATH"""


def _new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime, *usages: str
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(hours=1))  # a site's clock may be behind
        .not_valid_after(until)
        .add_extension(x509.KeyUsage(**{usage: usage in usages for usage in USAGES}), critical=True)
    )


def _in(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def _check_days(days: int, ca: x509.Certificate) -> None:
    left = round((ca.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1))
    if left < 1:
        raise UserError(f"the CA is valid until {ca.not_valid_after_utc:%Y-%m-%d} only; make a new folder")
    if not 1 <= days <= left:
        raise UserError(f"--days {days} is not possible: the CA is valid for {left} days more; write 1 to {left}")


def _load_authority(folder: Path) -> tuple[x509.Certificate, Key]:
    try:
        ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (ValueError, TypeError):
        raise UserError(f"{folder}/ca.crt and ca.key are not as `perennial certs` made them") from None
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return ca, key


def _free_names(folder: Path, count: int) -> list[str]:
    found = (re.fullmatch(r"site-(\d+)", path.name) for path in folder.glob("site-*"))
    first = max((int(match[1]) for match in found if match), default=0) + 1
    return [f"site-{number}" for number in range(first, first + count)]


def _check_names(names: Sequence[str], folder: Path) -> None:
    for name in names:
        if not NAME.fullmatch(name) or name.endswith(".pub"):
            raise UserError(
                f"--name {name!r} cannot be a file's name; use letters (a to z, A to Z), digits, '.', '-' and "
                "'_', at most 64"
            )
        if names.count(name) > 1:
            raise UserError(f"--name {name!r} is given twice; each site has a key of its own")
        if (folder / name).exists() or (folder / f"{name}.pub").exists():
            raise UserError(f"{folder / name} is there already and is not overwritten; use another --name")


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        if not HOST.fullmatch(text):
            raise UserError(
                f"--host {text!r} is neither a host name nor an IP address; write e.g. superlink.example"
            ) from None
        return x509.DNSName(text)


def _pem(key: Key, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _write_all(folder: Path, files: Mapping[str, tuple[bytes, int]]) -> None:
    """Contents and modes by name. Raises `UserError` where one cannot be written; then there is none."""
    lowest = folder / "sites"
    missing = [place for place in (lowest, *lowest.parents) if not place.exists()]
    written: list[Path] = []
    try:
        for place in (folder, lowest):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            place.chmod(0o700)
        for name, (content, mode) in files.items():
            # Never over another file, and never readable by others, not even for a moment.
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            written.append(folder / name)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
    except BaseException as error:
        for path in written:
            path.unlink()
        for place in missing:
            with suppress(OSError):
                place.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"{folder} cannot be written ({error.strerror}); nothing was made") from None
        raise
