"""`perennial join` without Flower: what is looked at first, what is said, what is started again."""

import itertools
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509 import load_pem_x509_certificate
from flwr.common.config import parse_config_args
from grpc_listener import listening
from typer.testing import CliRunner

from perennial.client.node import join
from perennial.client.node.join import NO_FLEET, NOT_REGISTERED, NOT_TAKEN, Narrator, Plan, Teller
from perennial.client.node.settings import Consent
from perennial.common.flower.processes import program
from perennial.common.utils.addresses import Address, Unreachable, ends_soon
from perennial.common.utils.errors import UserError
from perennial.common.utils.events import set_format
from perennial.server.cli.main import app
from perennial.server.deployment.certs import make

HERE = "127.0.0.1:9092"
FLAGS: dict[str, Any] = {
    "data": None, "partition": None, "name": "", "label_column": "", "environment_column": "", "device": "cpu",
    "ca": None, "key": None, "insecure": False, "health": "", "metrics": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "keys"
    make(folder, ["clinic"], [], 30)
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "my data" / "north.csv"
    path.parent.mkdir()
    path.write_text("age,label\n30,ill\n40,well\n")
    return path


def prepare(tmp_path: Path, superlink: str = HERE, **flags: Any) -> Plan:
    return join.prepare(superlink, **{**FLAGS, "state": tmp_path / "state", **flags})


# ---------------------------------------------------------------------- what is looked at first


def test_a_plan_holds_absolute_paths_and_only_what_was_said(table: Path, tmp_path: Path) -> None:
    plan = prepare(tmp_path, data=table, environment_column="age", health="127.0.0.1:1")
    settings = {
        "device": "cpu", "state-dir": str(tmp_path / "state"), "superlink": HERE, "data": str(table),
        "name": "north", "environment-column": "age",
    }  # fmt: skip
    assert plan == Plan(HERE, "", "", "127.0.0.1:1", settings)
    assert prepare(tmp_path, partition=3).settings["partition-id"] == 3
    assert Plan(**json.loads(json.dumps(asdict(plan)))) == plan


def test_a_site_is_called_as_it_says_or_as_its_key_or_as_its_data(
    table: Path, certs: Path, tmp_path: Path
) -> None:
    secure = {"data": table, "ca": certs / "ca.crt", "key": certs / "sites" / "clinic"}
    assert prepare(tmp_path, **secure).settings["name"] == "clinic"
    assert prepare(tmp_path, **secure, name="west").settings["name"] == "west"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({}, "say what this site has: --data PATH, or --partition N of a run's scenario, one of the two"),
        ({"data": "north.csv", "partition": 0}, "say what this site has"),
        ({"partition": 0, "name": "a"}, "--name, --label-column, --environment-column, --survey, --separator"),
        (
            {"partition": 0, "survey": Consent.full},
            "--name, --label-column, --environment-column, --survey, --sep",
        ),
        (
            {"partition": 0, "superlink": "somewhere"},
            "--superlink 'somewhere' is no address; write HOST:PORT, e.g. .*:9092",
        ),
        ({"partition": 0, "superlink": "far.example:9092"}, "far.example:9092 is another machine: give --ca FILE"),
        ({"partition": 0, "ca": "ca.crt", "insecure": True}, "--ca asks for TLS and --insecure for plaintext"),
        ({"partition": 0, "key": "key"}, "--key FILE is of use with TLS alone"),
        ({"partition": 0, "ca": "ca.crt", "key": "none"}, "--key none: No such file or directory"),
        (
            {"partition": 0, "superlink": "a..b:1", "insecure": True},
            "--superlink 'a..b:1' is no address; write HOST",
        ),
        ({"partition": 0, "health": "nonsense"}, "--health 'nonsense' is no address; write HOST:PORT, e.g. 127.0"),
        ({"partition": 0, "device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"partition": 0, "code": "mine"}, "--code 'mine' is not possible; write installed or shipped"),
        ({"partition": 0, "code": "shipped", "policy": "none"}, "--policy is kept by installed code alone"),
        ({"partition": 0, "policy": "none"}, "--policy .*/my data/none: No such file or directory"),
        ({"partition": 0, "policy": "north.csv"}, "--policy .*/north.csv: "),
        ({"partition": 0, "device": "tpu"}, "device 'tpu' is unknown; use auto, cpu, cuda or cuda:N$"),
        ({"partition": 0, "state": "north.csv/state"}, "--state .*: Not a directory; the personal model is to be"),
        ({"data": "gone.csv"}, "--data .*/my data/gone.csv: there is no such file or folder"),
        ({"data": "north.csv", "label_column": "died"}, "north.csv has no column 'died' for the label"),
        ({"data": "north.csv", "name": "a b"}, "--name 'a b' is not possible; take letters"),
        ({"data": "north.csv", "name": "süd"}, r"--name 'süd' is not possible; take letters \(a to z, A to Z\)"),
        ({"data": "empty.csv"}, "empty.csv has no rows"),
        ({"data": "pictures"}, "picture .*pictures/cat/1.png cannot be read"),
    ],
)
def test_flags_that_cannot_be_are_one_sentence(
    flags: dict[str, Any], sentence: str, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(table.parent)
    Path("empty.csv").write_text("age,label\n")
    Path("pictures/cat").mkdir(parents=True)
    Path("pictures/cat/1.png").write_text("no picture")
    paths = {key: Path(flags[key]) for key in ("data", "ca", "key", "state", "policy") if key in flags}
    with pytest.raises(UserError, match=f"^{sentence}"):
        prepare(table.parent, **{**flags, **paths})


def test_a_key_must_be_one_that_flower_takes(certs: Path, tmp_path: Path) -> None:
    join.check_key(certs / "sites" / "clinic")
    for wrong in (certs / "sites" / "clinic.pub", certs / "ca.key", certs / "ca.crt"):
        with pytest.raises(UserError, match=r"is no private elliptic-curve key in OpenSSH's form"):
            join.check_key(wrong)
    other = tmp_path / "ed25519"
    form = (Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    other.write_bytes(Ed25519PrivateKey.generate().private_bytes(*form))
    with pytest.raises(UserError, match=r"is no private elliptic-curve key in OpenSSH's form"):
        join.check_key(other)


@pytest.mark.skipif(not which("ssh-keygen"), reason="needs ssh-keygen")
def test_nobody_can_type_a_passphrase(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "secret", "-f", str(key)], check=True)
    with pytest.raises(UserError, match="is locked with a passphrase"):
        join.check_key(key)


def test_nothing_secret_and_no_port_of_others_is_on_the_command_line(certs: Path, tmp_path: Path) -> None:
    key = certs / "sites" / "clinic"
    plan = prepare(tmp_path, "far.example:9092", partition=0, ca=certs / "ca.crt", key=key)
    command = plan.command(Path("/tmp/node.toml"))
    assert command[command.index("--root-certificates") + 1] == str(certs / "ca.crt")
    assert command[command.index("--auth-supernode-private-key") + 1] == str(key)
    assert "--insecure" not in command
    assert not any(line in " ".join(command) for line in key.read_text().splitlines())
    plain = prepare(tmp_path, partition=0, health="127.0.0.1:9090").command(Path("/tmp/node.toml"))
    assert "--insecure" in plain
    assert plain[-2:] == ["--health-server-address", "127.0.0.1:9090"]


@pytest.fixture
def own_process() -> Iterator[None]:
    """What `main` sets for the whole process is as before afterwards."""
    umask, handler = os.umask(0o022), signal.getsignal(signal.SIGTERM)
    yield
    os.umask(umask)
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("own_process")
def test_code_that_is_shipped_is_flower_s_own_supernode_and_said_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed, shipped = (prepare(tmp_path, partition=0, code=code) for code in ("installed", "shipped"))
    assert installed.command(Path("/tmp/node.toml"))[: len(join.SUPERNODE)] == join.SUPERNODE
    command = shipped.command(Path("/tmp/node.toml"))
    assert command[0] == program("flower-supernode")
    assert command[command.index("--clientappio-api-address") + 1] == "127.0.0.1:0"
    monkeypatch.setattr(join, "keep_running", lambda *_: None)
    for plan in (installed, shipped):
        monkeypatch.setattr(sys, "argv", ["join", json.dumps(asdict(plan))])
        join.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[2] for line in said] == [join.SHIPPED]


def test_flower_reads_the_settings_whatever_is_in_a_path(tmp_path: Path) -> None:
    """Quotes, blanks and equals signs in paths, at which `--node-config` with the settings themselves breaks."""
    settings = {"data": '/my "data" = it\'s/ä.csv', "name": "a", "partition-id": 3}
    (tmp_path / "node.toml").write_text(tomli_w.dumps(settings))
    assert parse_config_args([str(tmp_path / "node.toml")]) == settings


def test_what_stays_resident_is_small() -> None:
    heavy = "{'torch', 'flwr', 'numpy', 'pydantic'}"
    code = f"import sys, perennial.client.node.join; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------------- what is said

LOG = """\
\x1b[92mINFO \x1b[0m:      Starting Flower SuperNode
\x1b[93mWARNING \x1b[0m:   Option `--insecure` was set.
\x1b[92mINFO \x1b[0m:      SuperNode ID: 42
\x1b[92mINFO \x1b[0m:      
\x1b[92mINFO \x1b[0m:      [RUN 7, ROUND 0]
\x1b[92mINFO \x1b[0m:      Receiving: query message (ID: 1)
\x1b[92mINFO \x1b[0m:      perennial: north is in run 7
\x1b[92mINFO \x1b[0m:      [RUN 7, ROUND 3]
\x1b[92mINFO \x1b[0m:      Receiving: train.gradient message (ID: 2)
\x1b[92mINFO \x1b[0m:      [RUN 7, ROUND 3]
\x1b[92mINFO \x1b[0m:      Sending: train.gradient message (ID: 3)
\x1b[91mERROR \x1b[0m:     perennial: this site takes no part in the run: no data
\x1b[93mWARNING \x1b[0m:   Connection attempt failed, retrying in 0.30 seconds
\x1b[93mWARNING \x1b[0m:   Connection attempt failed, retrying in 1.95 seconds
\x1b[92mINFO \x1b[0m:      Connection successful after 4.00 seconds and 3 tries.
Traceback (most recent call last):
\x1b[91mERROR \x1b[0m:     Heartbeat failed
"""  # noqa: W291 - as Flower writes it


def test_a_supernodes_log_in_plain_words() -> None:
    narrator = Narrator(HERE)
    told = [text for line in LOG.splitlines() if (text := narrator.tell(line))]
    assert told == [
        f"connected to {HERE} as node 42; waiting for a run",
        "north is in run 7",
        "round 3: train.gradient",
        "this site takes no part in the run: no data",
        f"the SuperLink at {HERE} does not answer; trying again until it does",
        f"the SuperLink at {HERE} answers again",
    ]
    assert (narrator.connected, narrator.refusal, narrator.error) == (True, "", "Heartbeat failed")


@pytest.mark.parametrize(
    "name",
    [
        '1 "code": 2001',
        'details = "{"code": 2001',
        '\n\tdetails = "{"code": 2001',
        "\n\tstatus = StatusCode.UNIMPLEMENTED",
        "9" * 5000,
    ],
)
def test_what_a_server_calls_a_round_does_not_end_a_site(name: str) -> None:
    narrator = Narrator(HERE)
    for line in ("INFO : SuperNode ID: 1", *f"INFO :      [RUN 7, ROUND {name}]".splitlines()):
        narrator.tell(line)
    assert narrator.tell("INFO : Receiving: train message (ID: 1)") == "round 0: train"
    assert narrator.refusal == ""
    early = Narrator(HERE)
    early.tell(f"INFO :      [RUN 7, ROUND {name.strip()}]")
    assert early.refusal == ""


def test_nothing_that_a_terminal_would_obey_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    narrator = Narrator(HERE)
    narrator.tell("ERROR : failed \x1b]0;title\x07with \x1b[2J\x9b2Jthis")
    Teller()(f"{narrator.error}\n12:00:00 \x1b[8mall is well")
    assert narrator.error == "failed with  2Jthis"
    assert capsys.readouterr().out.partition(" ")[2] == "failed with  2Jthis 12:00:00 all is well\n"


def test_of_a_survey_no_round_of_training_is_told() -> None:
    """With secure aggregation its masks are agreed on by messages called `train.keys` and so on."""
    narrator, told = Narrator(HERE), list[str]()
    for run, number, action in (("5", 0, "query.shape"), ("5", 1, "train.keys"), ("6", 1, "train.keys")):
        for line in (
            f"INFO :      [RUN {run}, ROUND {number}]",
            f"INFO :      Receiving: {action} message (ID: 1)",
        ):
            told.append(narrator.tell(line))
    assert list(filter(None, told)) == ["round 1: train.keys"]
    assert narrator.known == {"round": 1, "action": "train.keys"}


def test_a_port_of_the_superlink_that_no_site_joins_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    narrator = Narrator(HERE)
    assert narrator.tell("\tstatus = StatusCode.UNIMPLEMENTED") == ""
    assert narrator.refusal == NO_FLEET
    with pytest.raises(UserError, match="what answers is no SuperLink's Fleet API; its port is 9092 unless"):
        World(monkeypatch, [], [(1.0, False, NO_FLEET, 1)]).go()
    World(monkeypatch, [], [(100.0, True, "", 1), (1.0, False, NO_FLEET, 1)]).go()  # something else for a while


def test_the_superlinks_refusal_is_found_in_a_traceback() -> None:
    narrator = Narrator(HERE)
    line = (
        '\tdetails = "{"code": 2004, "public_message": "Failed to activate SuperNode.", "public_details": null}"'
    )
    assert narrator.tell(line) == ""
    assert narrator.refusal == NOT_TAKEN


def test_a_site_s_actions_are_timed_and_told_to_prometheus_and_as_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrator, metrics, now = Narrator(HERE), join.SiteMetrics(), itertools.count(100.0, 2.5)
    monkeypatch.setattr(join.time, "monotonic", lambda: next(now))
    for line in LOG.splitlines():
        narrator.tell(line)
        metrics.add(narrator)
    found = {
        (one.name, *one.labels.values()): one.value
        for one in itertools.chain.from_iterable(family.samples for family in metrics.registry.collect())
    }
    assert found["perennial_site_action_duration_seconds_sum", "train.gradient"] == 2.5
    assert (found["perennial_site_connected",], found["perennial_site_round",]) == (1, 3)
    for number in range(2 * join.MOST_ACTIONS):  # as a hostile server may call its own
        for way in ("Receiving", "Sending"):
            narrator.tell(f"INFO : {way}: train.x{number} message")
            metrics.add(narrator)
    (seconds,) = (family for family in metrics.registry.collect() if "duration" in family.name)
    told = {sample.labels["action"] for sample in seconds.samples}
    assert len(told) == join.MOST_ACTIONS + 1
    assert {"train.gradient", "train.x0", "other"} <= told
    metrics.add(Narrator(HERE))
    assert metrics.registry.get_sample_value("perennial_site_connected") == 0
    monkeypatch.setenv("PERENNIAL_LOG_FORMAT", "text")
    set_format("json")
    try:
        Teller()("round 3: train", round=3, action="train")
    finally:
        set_format("text")
    event = json.loads(capsys.readouterr().err)
    assert (event["event"], event["round"], event["action"]) == ("round 3: train", 3, "train")


def test_the_same_is_said_once_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    say = Teller()
    for text in ("a", "a", "b", "a"):
        say(text)
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == ["a", "b", "a"]


def test_a_word_that_cannot_be_written_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", full := Full())
    Teller()("a")
    assert full.getvalue().endswith(" a\n")


# ---------------------------------------------------------------------- what is started again


class Enough(Exception):  # noqa: N818
    pass


class World:
    """A clock, a SuperLink and SuperNodes that do as told, one outcome after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[Any], nodes: list[Any]) -> None:
        self.now, self.slept, self.said = 1000.0, list[float](), list[str]()
        self.answers, self.nodes = iter(answers), iter(nodes)
        monkeypatch.setattr(join, "must_answer", self.must_answer)
        monkeypatch.setattr(join, "run_once", self.run_once)
        monkeypatch.setattr(join.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(join.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def must_answer(self, *_: Any) -> None:
        if answer := next(self.answers, None):
            raise answer

    def run_once(self, *_: Any) -> tuple[Narrator, int]:
        """`(seconds, connected, refusal, code)`; after the last one, an end."""
        try:
            seconds, connected, refusal, code = next(self.nodes)
        except StopIteration:
            raise Enough from None
        self.now += seconds
        node = Narrator(HERE)
        node.connected, node.refusal = connected, refusal
        return node, code

    def go(self) -> None:
        with pytest.raises(Enough):
            join.keep_running(Plan(HERE, "", "", "", {}), Path(), self.said.append)


def test_a_supernode_that_ends_is_started_again_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    short = (1.0, True, "", 1)
    world = World(monkeypatch, [], [short] * 8 + [(100.0, True, "", -9)])
    world.go()
    assert world.slept == [1, 2, 4, 8, 16, 32, 60, 60, 1]
    assert world.said[-1] == "the SuperNode ended with exit code -9; it is started again"


def test_a_server_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Unreachable(f"the SuperLink at {HERE} cannot be reached: Connection refused")
    world = World(monkeypatch, [away, away], [])
    world.go()
    assert world.slept == [1, 2]
    assert world.said == [f"{away}; trying again until it answers"] * 2


def test_what_waiting_cannot_mend_ends_the_site_unless_it_was_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = UserError("a certificate that ca.crt does not vouch for")
    with pytest.raises(UserError, match="does not vouch"):
        World(monkeypatch, [wrong], []).go()
    world = World(monkeypatch, [None, wrong], [(100.0, True, "", 1)])  # a server that is being started again
    world.go()
    assert any("does not vouch" in text for text in world.said)
    with pytest.raises(UserError, match="lets in registered sites alone: give the site's --key FILE"):
        World(monkeypatch, [], [(1.0, False, NOT_REGISTERED, 1)]).go()
    world = World(monkeypatch, [], [(100.0, True, "", 1), (1.0, False, NOT_REGISTERED, 1)])
    world.go()
    assert world.said[-1].endswith("alone: give the site's --key FILE; trying again")


def test_a_certificate_that_ends_soon_is_told(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the owner at the start and every few hours, and to Prometheus at any time."""
    said, metrics, slept = list[str](), join.SiteMetrics(), list[float]()
    ends = load_pem_x509_certificate((certs / "server.crt").read_bytes()).not_valid_after_utc

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 2:
            raise Enough

    monkeypatch.setattr(join.time, "sleep", sleep)
    with listening(certs) as port:
        plan = Plan(f"127.0.0.1:{port}", str(certs / "ca.crt"), "", "", {})
        with pytest.raises(Enough):
            join.watch_certificate(plan, said.append, metrics)
        monkeypatch.setattr(join, "run_once", lambda *_: (_ for _ in ()).throw(Enough))
        with pytest.raises(Enough):
            join.keep_running(plan, Path(), said.append, metrics)
    assert said == [
        f"the certificate of the SuperLink at 127.0.0.1:{port} ends on {ends:%Y-%m-%d}, and no site gets in after "
        "that; its operator makes a new one with `perennial certs DIR --add`"
    ] * 3  # fmt: skip
    assert slept == [join.LOOK_AGAIN] * 3
    value = metrics.registry.get_sample_value("perennial_certificate_expiry_timestamp_seconds")
    assert value == ends.timestamp()
    assert not ends_soon(Address("127.0.0.1", port), ends.timestamp() + 86400)
    assert not ends_soon(Address("127.0.0.1", port), None)


@pytest.mark.parametrize(
    ("before", "first", "later"),
    [
        (
            False,
            "either the site's last session has not expired yet",
            "the site is connected from elsewhere, or this key",
        ),
        (True, "the site's last session has not expired yet", "the site is connected from elsewhere, or this key"),
    ],
)
def test_a_key_that_is_not_taken_is_tried_again_and_the_reason_gets_clearer(
    before: bool, first: str, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [(100.0, True, "", -9)] if before else []
    world = World(monkeypatch, [], lost + [(5.0, False, NOT_TAKEN, 1)] * 8)
    world.go()
    said = [text.partition("does not take this key: ")[2] for text in world.said if "does not take" in text]
    assert said[0].startswith(first)
    assert said[-1].startswith(later)
    assert all(
        ", or its operator has shut the site out, which then needs a new key; trying" in text for text in said
    )
    assert world.slept[-8:] == [10] * 8


# ---------------------------------------------------------------------- processes


def script(folder: Path, body: str) -> list[str]:
    path = folder / "node.py"
    path.write_text(body)
    return [sys.executable, "-u", str(path)]


FAMILY = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"])
    print("ERROR : ", "it has", child.pid)
    print("INFO : SuperNode ID: 1")
time.sleep(600)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "SECONDS_TO_STOP", 0.3)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.usefixtures("quick")
def test_nothing_is_left_even_of_children_that_do_not_listen(tmp_path: Path) -> None:
    with join.supernode(script(tmp_path, FAMILY)) as process:
        assert process.stdout
        child = int(process.stdout.readline().split()[-1])
        assert not gone(child)
    assert process.poll() == -9
    for _ in range(100):
        if gone(child):
            break
        time.sleep(0.05)
    assert gone(child)


@pytest.mark.usefixtures("quick", "own_process")
def test_what_a_site_writes_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state folder, where it is new; the log, also an old one; and what the SuperNode itself writes."""
    plan = prepare(tmp_path, partition=0, insecure=True)
    assert stat.S_IMODE(plan.state.stat().st_mode) == 0o700
    (plan.state / join.LOG).touch(0o644)
    theirs = tmp_path / "flower's"
    monkeypatch.setattr(Plan, "command", lambda *_: ["touch", str(theirs)])
    monkeypatch.setattr(join, "keep_running", lambda *arguments: join.run_once(*arguments))
    monkeypatch.setattr(sys, "argv", ["join", json.dumps(asdict(plan))])
    join.main()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (plan.state / join.LOG, theirs)] == [0o600, 0o600]


def test_all_lines_are_in_the_state_folder_and_the_telling_ones_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    command = script(tmp_path, "print('INFO : SuperNode ID: 9'); print('noise'); raise SystemExit(7)")
    monkeypatch.setattr(Plan, "command", lambda *_: command)
    plan = Plan(HERE, "", "", "", {"state-dir": str(tmp_path)})
    node, code = join.run_once(plan, tmp_path / "node.toml", said.append)
    assert (node.connected, code) == (True, 7)
    assert said == [f"connected to {HERE} as node 9; waiting for a run"]
    assert (tmp_path / join.LOG).read_text() == "INFO : SuperNode ID: 9\nnoise\n"


def test_a_supernode_s_last_words_are_why_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, plan = list[str](), Plan(HERE, "", "", "", {"state-dir": str(tmp_path)})
    monkeypatch.setattr(join, "must_answer", lambda *_: None)
    monkeypatch.setattr(join, "_pause", lambda _: (_ for _ in ()).throw(Enough))
    for last, reason in (("\\x1b[1mPort is in use.\\n", ": Port is in use"), ("INFO : it runs", "")):
        command = script(tmp_path, f"print('not this'); print('{last}'); raise SystemExit(1)")
        monkeypatch.setattr(Plan, "command", lambda *_, command=command: command)
        with pytest.raises(Enough):
            join.keep_running(plan, tmp_path / "node.toml", said.append)
        assert said[-1] == f"the SuperNode ended with exit code 1{reason}; it is started again"


def test_a_log_that_cannot_be_written_is_said_once_and_the_site_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said, log = list[str](), tmp_path / join.LOG
    log.symlink_to("/dev/full")
    monkeypatch.setattr(join.os, "chmod", lambda *_: None)
    command = script(tmp_path, "for i in range(500): print('INFO : perennial:', i, '.' * 80)")
    monkeypatch.setattr(Plan, "command", lambda *_: command)
    plan = Plan(HERE, "", "", "", {"state-dir": str(tmp_path)})
    assert join.run_once(plan, tmp_path / "node.toml", said.append)[1] == 0
    assert len(said) == 500
    assert capsys.readouterr().err == (
        f"perennial: {log} cannot be written: No space left on device; the program goes on without it\n"
    )


@pytest.mark.usefixtures("quick")
def test_a_supernode_that_is_refused_and_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = script(tmp_path, 'import time; print(\'details = "{"code": 2004}"\'); time.sleep(600)')
    monkeypatch.setattr(Plan, "command", lambda *_: command)
    plan = Plan(HERE, "", "", "", {"state-dir": str(tmp_path)})
    node, code = join.run_once(plan, tmp_path / "node.toml", list[str]().append)
    assert (node.refusal, code) == (NOT_TAKEN, None)


@pytest.mark.usefixtures("quick")
def test_an_interrupt_ends_the_supernode_without_a_word_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, said = list["subprocess.Popen[str]"](), list[str]()
    original = subprocess.Popen.wait

    def wait(process: Any, timeout: float | None = None) -> int:
        started.append(process)
        if len(started) == 1:
            raise KeyboardInterrupt
        return original(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    monkeypatch.setattr(Plan, "command", lambda *_: script(tmp_path, "import time; time.sleep(600)"))
    with pytest.raises(KeyboardInterrupt):
        join.run_once(Plan(HERE, "", "", "", {"state-dir": str(tmp_path)}), tmp_path / "node.toml", said.append)
    assert started[0].poll() == -15
    assert said == []


def ended(plan: Plan) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "perennial.client.node.join", json.dumps(asdict(plan))]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_server_that_speaks_otherwise_is_one_sentence_and_exit_code_2(certs: Path, tmp_path: Path) -> None:
    with listening(certs) as port:
        done = ended(prepare(tmp_path, f"127.0.0.1:{port}", partition=0))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"perennial: the SuperLink at 127.0.0.1:{port} does not speak plaintext gRPC: give its CA with --ca FILE\n"
    )


def test_a_key_that_others_can_read_is_taken_with_a_remark(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join.os, "execv", lambda *_: None)
    key = tmp_path / "clinic"
    key.write_bytes((certs / "sites" / "clinic").read_bytes())
    line = ["join", "--superlink", HERE, "--state", str(tmp_path / "state"), "--device", "cpu", "--partition", "0"]
    line += ["--ca", str(certs / "ca.crt"), "--key", str(key)]
    remarks = {}
    for mode in (0o600, 0o644):
        key.chmod(mode)
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 0
        remarks[mode] = result.stderr
    sentence = f"perennial: --key {key} can be read by others (mode 0644); say `chmod 600 {key}`\n"
    assert remarks == {0o600: "", 0o644: sentence}


def test_the_command_line_says_what_is_wrong_and_else_becomes_the_resident_process(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became = list[Any]()
    monkeypatch.setattr(join.os, "execv", lambda *call: became.append(call))
    line = ["join", "--superlink", HERE, "--state", str(tmp_path / "state"), "--device", "cpu"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
    assert "one of the two" in result.stderr
    assert became == []
    assert CliRunner().invoke(app, [*line, "--data", str(table)]).exit_code == 0
    ((_, argv),) = became
    assert argv[:4] == [sys.executable, "-P", "-m", "perennial.client.node.join"]
    assert Plan(**json.loads(argv[4])).settings["name"] == "north"
