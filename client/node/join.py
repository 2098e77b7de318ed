"""A site's own process: keeps a SuperNode running and says in plain lines what happens (`perennial join`).

`prepare` looks at everything first. What then stays resident is this module alone,
`python -m perennial.client.node.join PLAN`, which imports neither PyTorch nor Flower.
"""

import ctypes
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any, NoReturn

import tomli_w

from perennial.client.node.settings import Consent
from perennial.common.data.dialect import PLAIN, Dialect
from perennial.common.flower.processes import environment, must_have_grpc, program
from perennial.common.utils.addresses import Address, Unreachable, ends_soon, must_answer, must_be_protected
from perennial.common.utils.errors import UserError, printable
from perennial.common.utils.events import LogFile, is_json, set_format, tell
from perennial.common.utils.prometheus import Metrics, expose

Say = Callable[..., None]
"""Tells the site's owner a sentence, and what is known beside it."""
LOG = "supernode.log"
"""What the SuperNode and its children say, all of it; in the state folder."""
LOG_BYTES = 5_000_000
SECONDS_TO_STOP = 15.0
SUPERNODE = [sys.executable, "-P", "-m", "perennial.client.node.supernode"]
"""With its executor. It runs the code that is installed here."""
BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Seconds that an action takes."""
MOST_ACTIONS = 20
"""Kinds of message that a site's metrics tell apart."""
SHIPPED = "--code shipped: this site runs whatever code the server sends, and keeps to no policy and no audit file"
SESSION = 75.0
"""Seconds after which the SuperLink has surely let go of a node that vanished: two missed heartbeats and a bit."""
REFUSED_PAUSE, LONGEST_PAUSE = 10.0, 60.0
LOOK_AGAIN = 6 * 3600.0
"""Seconds between two looks at the SuperLink's certificate."""

NOT_REGISTERED, NOT_TAKEN, NO_FLEET = "2001", "2004", "UNIMPLEMENTED"
"""The SuperLink's words, as codes: only registered keys may join; this key cannot now; no Fleet API is there."""
REFUSAL = re.compile(r'details = ".*?"code": (\d+)|status = StatusCode\.(UNIMPLEMENTED)')
"""How a line begins that has such a code, of an exception of gRPC's: no line that quotes what a run has sent."""
LASTING = {
    NOT_REGISTERED: "the SuperLink at {} lets in registered sites alone: give the site's --key FILE",
    NO_FLEET: "no site can join at {}: what answers is no SuperLink's Fleet API; "
    "its port is 9092 unless set otherwise",
}
"""What no waiting can mend, at a site that was never connected."""
FLEET = "superlink.example:9092"
"""What an address for `--superlink` looks like here."""


@dataclass(frozen=True)
class Plan:
    """What to join, and with what; paths are absolute."""

    superlink: str
    ca: str
    """Empty: plaintext."""
    key: str
    health: str
    settings: Mapping[str, str | int]
    """The node's, as `perennial.client.node.settings.settings_in` knows them."""
    metrics: str = ""
    """Where Prometheus asks; empty: nowhere."""
    code: str = "installed"
    """Or "shipped": a process of Flower's for each message, with the code that the server has sent."""

    @property
    def state(self) -> Path:
        return Path(str(self.settings["state-dir"]))

    def command(self, node_config: Path) -> list[str]:
        """The SuperNode's command line. It has paths, but no secret."""
        command = [*SUPERNODE, "--superlink", self.superlink]
        if self.code == "shipped":  # its Runtime API at any free port, for this machine alone
            api = ["--clientappio-api-address", "127.0.0.1:0"]
            command = [program("flower-supernode"), "--superlink", self.superlink, *api]
        command += ["--node-config", str(node_config)]
        command += ["--root-certificates", self.ca] if self.ca else ["--insecure"]
        command += ["--auth-supernode-private-key", self.key] if self.key else []
        return command + (["--health-server-address", self.health] if self.health else [])


# ---------------------------------------------------------------------- before anything starts


def prepare(
    superlink: str,
    *,
    data: Path | None,
    partition: int | None,
    name: str,
    label_column: str,
    environment_column: str,
    device: str,
    state: Path,
    ca: Path | None,
    key: Path | None,
    insecure: bool,
    health: str,
    metrics: str,
    policy: Path | None = None,
    code: str = "installed",
    survey: Consent = Consent.none,
    least: int | None = None,
    dialect: Dialect = PLAIN,
) -> Plan:
    """The plan of a site whose flags, key, data and device are all right. Raises `UserError`."""
    from perennial.client.host import pick_device
    from perennial.common.data.scenarios.own_data import SITE, SITE_TEXT
    from perennial.common.data.site_files import check

    must_have_grpc()
    if (data is None) == (partition is None):
        raise UserError(
            "say what this site has: --data PATH, or --partition N of a run's scenario, one of the two"
        )
    must_be_protected(Address.parse(superlink, example=FLEET), ca, insecure)
    if key and not ca:
        raise UserError("--key FILE is of use with TLS alone: give the SuperLink's CA with --ca FILE")
    if key:
        check_key(key)
    pick_device(device)
    if code not in ("installed", "shipped"):
        raise UserError(f"--code {code!r} is not possible; write installed or shipped")
    if policy and code == "shipped":
        raise UserError("--policy is kept by installed code alone; leave out --code shipped")
    settings: dict[str, str | int] = {"device": device, "state-dir": str(_writable(state)), "superlink": superlink}
    if policy:
        from perennial.client.node.policy import read_policy

        settings["policy"] = str(policy.expanduser().absolute())
        read_policy(str(settings["policy"])).must_allow_server(superlink)
    if data is None:
        assert partition is not None
        if name or label_column or environment_column or survey != Consent.none or dialect != PLAIN:
            raise UserError(
                "--name, --label-column, --environment-column, --survey, --separator, --decimal and --encoding go "
                "with --data PATH"
            )
        settings["partition-id"] = partition
    else:
        data = data.expanduser().absolute()
        if not data.exists():
            raise UserError(f"--data {data}: there is no such file or folder")
        check(data, label_column, environment_column, dialect)
        name = name or (key or data).stem
        if not SITE.fullmatch(name):
            raise UserError(f"--name {name!r} is not possible; take {SITE_TEXT}")
        own = {
            "data": str(data),
            "name": name,
            "survey": survey.value if survey != Consent.none else "",
            "survey-least": least or "",
            "label-column": label_column,
            "environment-column": environment_column,
            **dialect.said(),
        }
        settings |= {setting: value for setting, value in own.items() if value}
    files = [str(path.expanduser().absolute()) if path else "" for path in (ca, key)]
    if metrics:
        Address.parse(metrics, "--metrics", "127.0.0.1:9464")
    if health:
        Address.parse(health, "--health", "127.0.0.1:9091")
    return Plan(superlink, files[0], files[1], health, settings, metrics, code)


def check_key(path: Path) -> None:
    """Raises `UserError` for a file that is no private key of a site."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.expanduser().read_bytes(), None)
    except OSError as error:
        raise UserError(f"--key {path}: {error.strerror}") from None
    except TypeError:
        raise UserError(f"--key {path} is locked with a passphrase, and nobody is there to type it") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UserError(
            f"--key {path} is no private elliptic-curve key in OpenSSH's form; `perennial certs` makes such keys"
        )


def _writable(folder: Path) -> Path:
    from perennial.common.utils.files import private_folder

    folder = folder.expanduser().absolute()
    try:
        if not folder.exists():  # one that is there stays as it is; all that is written in it is private
            private_folder(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"--state {folder}: {error.strerror}; the personal model is to be kept there") from None
    return folder


def become(plan: Plan) -> NoReturn:
    """Go on as `python -m client.node.join` in this very process, without all that `prepare` needed."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "perennial.client.node.join", json.dumps(asdict(plan))])


# ---------------------------------------------------------------------- while it runs


class Narrator:
    """From the lines of a SuperNode and its children to what a site's owner wants to know."""

    def __init__(self, superlink: str) -> None:
        self.superlink = superlink
        self.connected = False
        self.refusal = ""
        """A code of the SuperLink."""
        self.error = ""
        """The latest error in words."""
        self.last = ""
        """The latest line, unless it is one of a log: what a program says that cannot go on."""
        self.muted = False
        self.known: dict[str, Any] = {}
        """What is known of the latest line: round and action."""
        self.seconds: float | None = None
        """How long the action took whose reply was the latest line."""
        self.away = False
        """Whether the SuperLink does not answer now."""
        self._run, self._round, self._begun = "", "0", 0.0
        self._survey = ""
        """The latest run that is a survey."""

    def tell(self, line: str) -> str:
        """The line in plain words; empty where it is of no interest."""
        self.known, self.seconds = {}, None
        line = printable(line).strip()
        level, _, text = line.partition(":")
        level, text = level.strip(), text.strip()
        if line:
            self.last = "" if level in ("INFO", "WARNING", "ERROR") else line.rstrip(".")
        if level == "ERROR" and not text.startswith("perennial: "):
            self.error = text
        if not self.connected and (found := REFUSAL.match(line)):
            self.refusal = found[1] or found[2]
        if self.muted or level not in ("INFO", "WARNING", "ERROR"):
            return ""
        if text.startswith("perennial: "):
            return text.removeprefix("perennial: ")
        if found := re.fullmatch(r"SuperNode ID: (\d+)", text):
            self.connected = True
            return f"connected to {self.superlink} as node {found[1]}; waiting for a run"
        if found := re.match(r"\[RUN (\d+)(?:, ROUND (\d{1,9})\])?", text):  # a server names rounds as it likes
            self._run, self._round = found[1], found[2] or "0"
        if found := re.match(r"(Receiving|Sending): (\S+) message", text):
            if found[2] == "query.shape":
                self._survey = self._run
            # A survey trains nothing, though its masks are agreed on by messages that are called so.
            if found[2].startswith("query") or self._run == self._survey:
                return ""
            self.known = {"round": int(self._round), "action": found[2]}
            if found[1] == "Sending":
                self.seconds = round(time.monotonic() - self._begun, 3)
                return ""
            self._begun = time.monotonic()
            return f"round {self._round}: {found[2]}"
        if text.startswith("Connection attempt failed") and not self.away:
            self.away = True
            return f"the SuperLink at {self.superlink} does not answer; trying again until it does"
        if text.startswith("Connection successful") and self.away:
            self.away = False
            return f"the SuperLink at {self.superlink} answers again"
        return ""


class Teller:
    """Says something, with the time of day, or as an event; the same thing only once in a row."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str, **known: Any) -> None:
        text = printable(text)
        if text != self._last and is_json():
            tell(text, **known)
        elif text != self._last:
            with suppress(OSError):  # nobody reads it, or its disk is full: the site goes on
                print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
        self._last = text


class SiteMetrics(Metrics):
    """What a site tells Prometheus."""

    def __init__(self) -> None:
        super().__init__()
        self.connected = self.gauge("perennial_site_connected", "1 while a SuperLink knows this site.")
        ends = "When the SuperLink's certificate ends; 0 without TLS."
        self.certificate = self.gauge("perennial_certificate_expiry_timestamp_seconds", ends)
        self.starts = self.counter("perennial_site_starts", "Starts of the SuperNode.")
        self.round = self.gauge("perennial_site_round", "Round of the latest message.")
        times = "Time from a message to the reply."
        self.seconds = self.histogram("perennial_site_action_duration_seconds", times, "action", buckets=BUCKETS)
        self.last = self.gauge("perennial_site_last_reply_timestamp_seconds", "When it was sent.")
        self._actions = set[str]()

    def add(self, narrator: Narrator) -> None:
        """What the latest line of the SuperNode means."""
        self.connected.set(narrator.connected and not narrator.away)
        if known := narrator.known:
            self.round.set(known["round"])
        if narrator.seconds is not None:
            # A server may call its actions what it likes, and each name is kept as long as this process lives.
            action = narrator.known["action"]
            if len(self._actions) < MOST_ACTIONS:
                self._actions.add(action)
            self.seconds.labels(action if action in self._actions else "other").observe(narrator.seconds)
            self.last.set_to_current_time()


def keep_running(plan: Plan, node_config: Path, say: Say, metrics: SiteMetrics | None = None) -> NoReturn:
    """Start a SuperNode again whenever it ends. Raises `UserError` for what no waiting can mend."""
    address, ca = Address.parse(plan.superlink), Path(plan.ca) if plan.ca else None
    was_connected, refused_since, pause = False, 0.0, 1.0
    while True:
        try:
            check_superlink(address, ca, say, metrics)
        except UserError as error:
            if not was_connected and not isinstance(error, Unreachable):
                raise
            say(f"{error}; trying again until it answers")
            pause = _pause(pause)
            continue
        begun = time.monotonic()
        node, code = run_once(plan, node_config, say, metrics)
        now = time.monotonic()
        was_connected |= node.connected
        if wrong := LASTING.get(node.refusal, "").format(address):
            if not was_connected:
                raise UserError(wrong)
            say(f"{wrong}; trying again")
            pause = _pause(pause)
            continue
        if node.refusal == NOT_TAKEN:
            refused_since = refused_since or now
            say(_refusal(address, was_connected, now - refused_since))
            time.sleep(REFUSED_PAUSE)
            continue
        refused_since = 0.0
        if now - begun > LONGEST_PAUSE:
            pause = 1.0
        reason = "the SuperLink does not know this session any more" if code == 0 else node.last or node.error
        say(f"the SuperNode ended with exit code {code}{reason and f': {reason}'}; it is started again")
        pause = _pause(pause)


def check_superlink(address: Address, ca: Path | None, say: Say, metrics: SiteMetrics | None) -> None:
    """Whether the SuperLink answers; says if its certificate ends soon. Raises `UserError`."""
    ends = must_answer(address, ca)
    if metrics and ends:
        metrics.certificate.set(ends)
    if remark := ends_soon(address, ends):
        say(remark)


def watch_certificate(plan: Plan, say: Say, metrics: SiteMetrics | None) -> NoReturn:
    """Keep an eye on the certificate, because a SuperNode may run for months."""
    while True:
        time.sleep(LOOK_AGAIN)
        with suppress(UserError):  # whether anybody answers is the SuperNode's to tell
            check_superlink(Address.parse(plan.superlink), Path(plan.ca), say, metrics)


def run_once(
    plan: Plan, node_config: Path, say: Say, metrics: SiteMetrics | None = None
) -> tuple[Narrator, int | None]:
    """A SuperNode from its start to its end; what it told, and its exit code."""
    narrator = Narrator(plan.superlink)
    if metrics:
        metrics.starts.inc()
    log = LogFile(plan.state / LOG, maxBytes=LOG_BYTES, backupCount=1)
    os.chmod(log.baseFilename, 0o600)  # an older one

    def relate(lines: IO[str]) -> None:
        for line in lines:
            log.emit(logging.makeLogRecord({"msg": line.rstrip()}))
            if text := narrator.tell(line):
                say(text, **narrator.known)
            elif narrator.seconds is not None and is_json():
                tell("reply", **narrator.known, seconds=narrator.seconds)
            if metrics:
                metrics.add(narrator)

    with supernode(plan.command(node_config)) as process:
        assert process.stdout
        teller = Thread(target=relate, args=(process.stdout,), daemon=True)
        teller.start()
        try:
            code = _exit_code(process, narrator)
        except KeyboardInterrupt:
            narrator.muted = True  # it has nothing to say but that it ends
            raise
    teller.join(timeout=SECONDS_TO_STOP)
    log.close()
    if metrics:
        metrics.connected.set(0)
    return narrator, code


def _exit_code(process: "subprocess.Popen[str]", narrator: Narrator) -> int | None:
    """A SuperNode's exit code, once it has ended; None for one that was refused and hangs, as it often does."""
    while not narrator.refusal:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_STOP)
    return process.poll()


@contextmanager
def supernode(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A SuperNode in a process group of its own, all of which ends with the block."""
    process = subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes here alone
        preexec_fn=_end_with_parent,
    )
    try:
        yield process
    finally:
        process.terminate()  # it takes its leave, so that it may come back at once
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + SECONDS_TO_STOP / 3
            while _signal(process.pid, sign) and time.monotonic() < end:
                process.poll()
                time.sleep(0.1)


def _signal(group: int, sign: signal.Signals) -> bool:
    """Whether there was anybody in a process group to get the signal."""
    try:
        os.killpg(group, sign)
    except ProcessLookupError:
        return False
    return True


def _end_with_parent() -> None:
    if sys.platform == "linux":  # even if this process is killed
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _refusal(address: Address, was_connected: bool, seconds: float) -> str:
    """What it means that a key is not taken: the SuperLink's answer is the same for four reasons."""
    expiring = "the site's last session has not expired yet, which takes up to a minute"
    unknown = "this key is not registered (perennial register NAME.pub)"
    if seconds < SESSION:
        reason = expiring if was_connected else f"either {expiring}, or {unknown}"
    else:
        reason = f"the site is connected from elsewhere, or {unknown}"
    shut_out = "its operator has shut the site out, which then needs a new key"
    return f"the SuperLink at {address} does not take this key: {reason}, or {shut_out}; trying again"


def _pause(pause: float) -> float:
    """Wait that long; twice as long is next."""
    time.sleep(pause)
    return min(2 * pause, LONGEST_PAUSE)


def _start_metrics(plan: Plan) -> SiteMetrics | None:
    """The site's metrics, answered from now on; None where nobody asks. Raises `UserError`."""
    if not plan.metrics:
        return None
    metrics = SiteMetrics()
    expose(metrics.registry, Address.parse(plan.metrics))
    return metrics


def main() -> None:
    """Keep a SuperNode running by the plan in `argv`; ends at Ctrl-C and SIGTERM with everything it started."""
    os.umask(0o077)  # what a site writes, its SuperNode's log and Flower's files among it, is for its owner
    plan, say = Plan(**json.loads(sys.argv[1])), Teller()
    if is_json():
        set_format("json")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="perennial-") as folder:
            node_config = Path(folder) / "node.toml"
            node_config.write_text(tomli_w.dumps(plan.settings), encoding="utf-8")
            if plan.code == "shipped":
                say(SHIPPED)
            metrics = _start_metrics(plan)
            if plan.ca:
                Thread(target=watch_certificate, args=(plan, say, metrics), daemon=True).start()
            keep_running(plan, node_config, say, metrics)
    except UserError as error:
        if is_json():
            tell(str(error), level=logging.ERROR, exit_code=2)
        else:
            print(f"perennial: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        say("stopped")


if __name__ == "__main__":
    main()
