"""Runs on Flower's own processes: submit with `flwr run`, follow, and say how it ended."""

import os
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import tomli_w

from perennial.common.config import RunConfig
from perennial.common.flower import control_api, processes
from perennial.common.flower.processes import program
from perennial.common.utils.addresses import Address, ends_soon, must_answer, must_be_protected
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.files import write_text
from perennial.common.utils.parsing import from_json, from_toml
from perennial.server.deployment.fab import make_app
from perennial.server.deployment.remote_folder import PLACE, Receiver
from perennial.server.run.folder import RunFolder

STATUS_EVERY = 5.0
SECONDS = 30.0
"""For an answer of the Control API."""
SILENCE = 180.0
"""Seconds that a SuperLink may be away, to be started again, before a run that is followed counts as stopped."""
NO_CONTROL = "no Control API answers at this port; the SuperLink has it at 9093 unless set otherwise"


class FlowerFailed(RunStopped):
    """Flower ended the run without a word from Perennial."""


class Connection:
    """A SuperLink as the `flwr` command line knows it by name."""

    def __init__(self, name: str, environment: dict[str, str], options: str = "") -> None:
        """`options` are those by which a command line finds it."""
        self.name, self.options = name, options
        self.ends_soon = ""
        """A sentence on its certificate, where that ends soon."""
        self.environment = {**processes.environment(), **environment}

    def execute(self, config: RunConfig, out: Path, resume: bool = False) -> Iterator[dict[str, Any]]:
        """Submit a run and follow it; the rows of its log. Raises `RunStopped` or `UserError`."""
        with _with_marker(out):
            run_id = self.submit(config, out, resume)
            try:
                # Resumed, the folder has the configuration already.
                with Receiver(self.control(), run_id, out, "" if resume else config.toml()) as receiver:
                    yield from self.follow(run_id, out, receiver, resume)
            except KeyboardInterrupt:
                where = f", in {place_of(out)}" if out.exists() else ""
                goes_on = f"run {run_id} goes on at the SuperLink{where}"
                raise KeyboardInterrupt(f"{goes_on}; `perennial stop {run_id}{self.options}` ends it") from None

    def submit(self, config: RunConfig, out: Path, resume: bool = False) -> str:
        """Start a run; its Flower run id. Raises `UserError` with Flower's reason."""
        return self._submit(out, config=config.model_dump_json(), resume=str(place_of(out)) if resume else "")

    def survey(self, order: str, out: Path) -> dict[str, Any]:
        """Carry out a survey (`perennial.server.survey.survey`), and what came of it. Raises as `execute`."""
        with _with_marker(out):
            run_id = self._submit(out, survey=order)
            with Receiver(self.control(), run_id, out) as receiver:
                list(self.follow(run_id, out, receiver))
        return RunFolder(out).summary()

    def _submit(self, out: Path, **settings: str) -> str:
        settings |= {"out": str(out.resolve()), "desk": str(_marker(out))}
        with tempfile.TemporaryDirectory(prefix="perennial-") as folder:
            settings_file = Path(folder) / "settings.toml"
            settings_file.write_text(tomli_w.dumps(settings), encoding="utf-8")
            app = make_app(Path(folder) / "app")
            done = self._call("run", str(app), self.name, "--run-config", str(settings_file), "--format", "json")
        try:
            answer = from_json(done.stdout[done.stdout.index("{") :])
        except ValueError:
            text = " ".join((done.stderr or done.stdout).split())
            raise UserError(f"flwr run failed: {text[-300:]}") from None
        if not answer.get("success"):
            raise UserError(f"flwr run {self.name}: {_reason(answer)}")
        return str(answer["run-id"])

    def status(self, run_id: str) -> str:
        """Flower's word on a run, e.g. `running` or `finished:completed`. Raises `UserError` where it has none."""
        (run,) = control_api.runs_in(self.ask("ListRuns", run_id=int(run_id)))
        return control_api.status_of(run)

    def ask(self, method: str, **fields: Any) -> Any:
        """A call of the Control API with these fields. Raises `UserError` with the SuperLink's own words."""
        with self.control() as channel:
            try:
                return control_api.ask(channel, method, SECONDS, **fields)
            except grpc.RpcError as error:
                known = {
                    grpc.StatusCode.UNIMPLEMENTED: f"cannot be asked: {NO_CONTROL}",
                    grpc.StatusCode.UNAVAILABLE: f"cannot be reached: {error.details()}",
                }
                otherwise = f"says: {_public_words(error.details() or error.code().name)}"
                raise UserError(f"the SuperLink {known.get(error.code(), otherwise)}") from None

    def control(self) -> grpc.Channel:
        """A channel to the Control API, as `flwr` would open it."""
        home = Path(self.environment.get("FLWR_HOME") or Path.home() / ".flwr")
        known = from_toml((home / "config.toml").read_text(encoding="utf-8"))["superlink"][self.name]
        ca = known.get("root-certificates")
        certificates = (home / ca).read_bytes() if ca else None
        return control_api.channel(known["address"], bool(known.get("insecure")), certificates)

    def follow(
        self, run_id: str, out: Path, receiver: Receiver | None = None, resume: bool = False
    ) -> Iterator[dict[str, Any]]:
        """The rows of a run's log as they are written, until it has ended.

        Of a run that is resumed, the log in `out` ends at the checkpoint; from another desk it comes anew.

        Raises `RunStopped` when it did not end well, or when the SuperLink has been away for `SILENCE` seconds.
        """
        folder, seen, status = RunFolder(out), 0, ""
        comes_anew = resume and place_of(out) != out.resolve()
        if resume and not comes_anew:
            seen = folder.log.stat().st_size
        summary = out / "summary.json"  # the last thing that a run writes

        def hint(when: str = "") -> str:
            if not (folder.checkpoints() or (out / PLACE).exists()):
                return ""
            return f"; {when}`{folder.resume_command}{self.options}` goes on from the last checkpoint"

        checked = heard = time.monotonic()
        while not status.startswith("finished"):
            time.sleep(0.3)
            ended = summary.exists() or (out / "error.txt").exists()
            if ended or time.monotonic() - checked > STATUS_EVERY:
                try:
                    status = self.status(run_id)
                    heard = time.monotonic()
                except UserError as error:
                    if summary.exists():
                        status = "finished:completed"
                    elif "not found" in str(error):
                        lost = (
                            f"the SuperLink was started again without its database and does not know run {run_id}"
                        )
                        raise RunStopped(f"{lost}{hint()}") from None
                    elif time.monotonic() - heard > SILENCE:
                        away = f"the SuperLink has not answered for {SILENCE:g} seconds"
                        raise RunStopped(f"{away} ({error}){hint('once it is back, ')}") from None
                checked = time.monotonic()
            if receiver and status.startswith("finished"):
                receiver.drained(SILENCE)
            if comes_anew and receiver and not receiver.log_comes:
                continue
            rows, seen = folder.rows_after(seen)
            yield from rows
        if status != "finished:completed" and not summary.exists():
            word = out / "error.txt"
            if word.exists():
                raise RunStopped(word.read_text(encoding="utf-8", errors="replace").strip())
            if seen and not out.exists():
                raise RunStopped(f"{out} was removed while the run wrote into it; start the run again")
            out.mkdir(parents=True, exist_ok=True)
            write_text(out / "flower.log", self._call("log", run_id, self.name, "--show").stdout)
            if status == "finished:stopped":
                raise RunStopped(f"run {run_id} was stopped{hint()}")
            log = out / "flower.log"
            raise FlowerFailed(f"Flower says of run {run_id}: {status}; its log is in {log}{hint()}")

    def _call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [program("flwr"), *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)


def _public_words(details: str) -> str:
    """Flower's public words, which it sends as JSON."""
    try:
        found = from_json(details)
        return str(found.get("public_details") or found.get("public_message") or details)
    except (ValueError, AttributeError):
        return details


def place_of(out: Path) -> Path:
    """Where the folder of a run is that ran elsewhere, or else here."""
    there = out / PLACE
    return Path(there.read_text(encoding="utf-8", errors="replace").strip()) if there.exists() else out.resolve()


@contextmanager
def _with_marker(out: Path) -> Iterator[None]:
    """Leaves no marker behind, but where a run goes on whose ServerApp has not looked for it yet."""
    goes_on = False
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        goes_on = not out.exists()
        raise
    finally:
        if not goes_on:
            _marker(out).unlink(missing_ok=True)


def _marker(out: Path) -> Path:
    """A file beside a run folder, there while the run is followed, or has not begun; made where it is not.

    A ServerApp that sees it writes the run folder itself; one that does not sends it (`remote_folder.py`).

    Raises `UserError` where it cannot be made.
    """
    out = out.resolve()
    marker = out.parent / f".{out.name}.desk-{socket.gethostname()}-{os.getpid()}"
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        raise UserError(f"{out} cannot be made: {error.strerror}; give another --out") from None
    return marker


def _reason(answer: dict[str, Any]) -> str:
    lines = str(answer.get("error-message", answer)).splitlines()
    reason = " ".join(" ".join(line for line in lines if not line.startswith("Using SuperLink")).split())
    return NO_CONTROL if reason == "Method not found!" else reason


@contextmanager
def connected(superlink: str, ca: Path | None = None, insecure: bool = False) -> Iterator[Connection]:
    """A SuperLink by its Control API's `HOST:PORT`, or by its name in Flower's config.toml.

    Raises `UserError` when it cannot be spoken to as asked.
    """
    processes.must_have_grpc()
    if ":" not in superlink:
        if ca or insecure:
            raise UserError(f"--ca and --insecure go with --superlink HOST:PORT, and {superlink!r} is but a name")
        _must_be_known(superlink)
        yield Connection(superlink, {}, "" if superlink == "deployment" else f" --superlink {superlink}")
        return
    address = Address.parse(superlink)
    must_be_protected(address, ca, insecure)
    ends = must_answer(address, ca)
    protection = {"root-certificates": str(ca.resolve())} if ca else {"insecure": True}
    options = f" --superlink {address} " + (f"--ca {shlex.quote(str(ca))}" if ca else "--insecure")
    with tempfile.TemporaryDirectory(prefix="perennial-") as home:
        connection = _connection(Path(home), {"address": str(address), **protection}, options)
        connection.ends_soon = ends_soon(address, ends)
        yield connection


def _must_be_known(name: str) -> None:
    # Asked for a name that it does not know, Flower makes a config.toml with names of its own.
    file = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        names = from_toml(file.read_text(encoding="utf-8")).get("superlink", {})
    except (OSError, ValueError):
        names = {}
    known = names.get(name) if isinstance(names, dict) else None
    if known is None:
        raise UserError(
            f"--superlink {name!r} is no name in Flower's {file}; say where the SuperLink is: "
            "--superlink HOST:PORT"
        )
    if not isinstance(known, dict) or not isinstance(known.get("address"), str):
        raise UserError(
            f"--superlink {name!r} names no SuperLink in Flower's {file}: there is no [superlink.{name}] with "
            'address = "HOST:PORT"; take a name that has one, or say --superlink HOST:PORT'
        )


def _connection(home: Path, settings: dict[str, Any], options: str = "") -> Connection:
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"here": settings}}), encoding="utf-8")
    return Connection("here", {"FLWR_HOME": str(home)}, options)


def await_port(port: int, process: subprocess.Popen[Any], log: Path) -> None:
    """Wait until a process listens on a port. Raises `RunStopped` if it ends or takes too long."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(0.5)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RunStopped(f"{Path(str(process.args[0])).name} did not come up; see {log}")  # type: ignore[index]
