"""A deployment over many rounds: memory of its processes over time, and bad luck of every kind.

    uv run python benchmarks/soak.py FOLDER [--sites N] [--rounds N] [--seed N] [--luck] [--only NAME,NAME]
                                     [--minutes M]

A SuperLink with TLS, keys of sites and a database, its SuperExec, and N times `perennial join`, on this machine. A
proxy before each site makes rounds slow, so that they take little of the machine. `perennial run` starts the run.
Every few seconds the resident size of each process goes to FOLDER/memory.csv, and at the end to FOLDER/memory.svg.

With `--luck`, one fault after the other is drawn from `FAULTS`, all once before one comes again: processes
are killed or hang, the proxies break what they pass on, disks are full, clocks jump, a certificate ends. Each is
mended as an operator would, the next comes once two more rounds are done. A site that misses a round changes the
model, so all must answer (`quorum=1`), and a run that stops is resumed. What operator and sites were told is in
FOLDER/events.txt. Full disks need the right to mount one, clocks need a C compiler.

At the end arrays and evaluations are compared with those of a local run that nothing disturbs, and the memory of
each process in the second and the last quarter of its life. Exit code 1: something is lost, or a process grew.
"""

import argparse
import csv
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread

import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    load_pem_private_key,
)
from rounds import Process, processes
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from bad_luck import MOODS, Proxies, wrong_clock

from perennial.common.config import load_config
from perennial.common.flower.processes import environment, free_port, program
from perennial.server.deployment import certs
from perennial.server.deployment.submission import Connection
from perennial.server.deployment.testbed import Deployment
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder

PERENNIAL = [sys.executable, "-c", "from perennial.server.cli.main import main; main()"]
DISK = "20m"
RESTART = 5.0
"""Seconds until a service starts a process again, as in `docker/systemd`."""
HANGS = 60.0
PATIENCE = 900.0
"""Seconds until a run that does not go on counts as lost."""
LEAST_LIFE = 900.0
"""Seconds of a process whose memory counts."""
GROWTH = 1.05
DAY = 86_400
ERRORS = ("Traceback", "Segmentation fault")


class World:
    """The deployment, what keeps it running, and the operator who follows the run."""

    def __init__(self, wish: argparse.Namespace) -> None:
        self.folder, self.sites, self.draw = wish.folder, wish.sites, random.Random(wish.seed)
        self.certs, self.disks = self.folder / "certs", list[Path]()
        certs.make(self.certs, wish.sites, [], days=60)
        self.clocks = wrong_clock(self.folder) if wish.luck else None
        self.control, fleet, runtime = free_port(), free_port(), free_port()
        self.proxies = Proxies(wish.sites, fleet)
        self.place = Deployment(Connection("soak", {}), {}, self.folder, self.control, fleet)
        tls = [
            (f"{own}ssl-{name}", name) for own in ("", "appio-") for name in ("certfile", "keyfile", "ca-certfile")
        ]
        file = {"certfile": "server.crt", "keyfile": "server.key", "ca-certfile": "ca.crt"}
        self.command("superlink", "clock-server", program("flower-superlink"), *(
            word for flag, name in tls for word in (f"--{flag}", self.certs / file[name])),
            "--enable-supernode-auth", "--isolation", "process", "--database", self.folder / "state.db",
            "--superexec-auth-secret-file", self.certs / "superexec.secret",
            "--control-api-address", f"127.0.0.1:{self.control}", "--fleet-api-address", f"127.0.0.1:{fleet}",
            "--serverappio-api-address", f"127.0.0.1:{runtime}",
        )  # fmt: skip
        self.command(
            "superexec", "clock-server", program("flower-superexec"), "--root-certificates", self.certs / "ca.crt",
            "--plugin-type", "serverapp", "--appio-api-address", f"127.0.0.1:{runtime}",
            "--superexec-auth-secret-file", self.certs / "superexec.secret",
        )  # fmt: skip
        for site, port in enumerate(self.proxies.ports):
            self.command(
                f"site-{site}", f"clock-{site}", *PERENNIAL, "join", "--superlink", f"127.0.0.1:{port}",
                "--ca", self.certs / "ca.crt", "--key", self.certs / "sites" / f"site-{site + 1}",
                "--partition", site, "--state", self.folder / f"state-{site}", "--device", "cpu",
            )  # fmt: skip
        self.held, self.away = set[str](), dict[str, float]()
        self.memory: dict[Process, list[tuple[float, float]]] = {}
        self.over, self.begun = Event(), time.monotonic()
        self.operator: subprocess.Popen[bytes] | None = None
        self.out = self.disk("disk") / "run"
        self.said = self.folder / "operator.log"
        self.resumed, self.lost = 0, ""

    # ------------------------------------------------------------------ processes

    def command(self, name: str, clock: str, *words: object) -> None:
        """How a process is started, by the clock of this name."""
        (self.folder / clock).write_text("0\n")
        env = [f"LD_PRELOAD={self.clocks}", f"WRONG_CLOCK={self.folder / clock}"] if self.clocks else []
        self.place.commands[name] = ["env", "OMP_NUM_THREADS=1", *env, *map(str, words)]

    def disk(self, name: str) -> Path:
        """A folder on a small disk of its own, where one may be mounted."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)]
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:
            self.disks.append(place)
        return place

    def pids(self, kind: str, below: str = "") -> list[int]:
        """The processes of a kind, all or those of one service."""
        roots = {name: process for name, process in self.place.processes.items() if below in ("", name)}
        part = Deployment(self.place.connection, {}, self.folder, 0, 0, roots)
        return [process.pid for process in processes(part) if process.kind == kind]

    def keep(self) -> None:
        """What services do: start again what has ended. And the operator: resume what has stopped."""
        while not self.over.wait(1.0):
            now = time.monotonic()
            for name in self.place.commands:
                process = self.place.processes.get(name)
                if name in self.held or (process and process.poll() is None):
                    continue
                if process and now - self.away.setdefault(name, now) < RESTART:
                    continue
                self.away.pop(name, None)
                self.place.start(name)
            if int(now) % 5 == 0:
                for own in processes(self.place):
                    key = Process(own.pid, own.kind, 0, 0)
                    self.memory.setdefault(key, []).append((now, own.mib))
            if self.operator and (code := self.operator.poll()) is not None:
                if code == 0:
                    self.operator = None
                    self.over.set()
                    return
                time.sleep(RESTART)
                self.resumed += code == 3
                begun = bool(RunFolder(self.out).checkpoints())
                self.follow("resume" if begun else "run")

    def follow(self, word: str) -> None:
        """`perennial run`, or `resume`."""
        where = ["--superlink", f"127.0.0.1:{self.control}", "--ca", str(self.certs / "ca.crt")]
        start = [
            "run",
            "--config",
            str(self.folder / "run.toml"),
            "--out",
            str(self.out),
            "--runtime",
            "deployment",
        ]
        if word == "run" and self.out.exists():
            shutil.rmtree(self.out)
        words = start if word == "run" else ["resume", str(self.out)]
        with self.said.open("a") as file:
            self.operator = subprocess.Popen(
                [*PERENNIAL, *words, *where], stdout=file, stderr=file, env={**environment(), "COLUMNS": "200"}
            )

    def end_early(self) -> int:
        """The operator ends the run, and resumes it with fewer rounds; how many."""
        assert self.operator
        rounds, file = self.round() + 5, self.out / "config.toml"
        file.write_text(
            re.sub(r"^rounds = \d+", f"rounds = {rounds}", file.read_text(), count=1, flags=re.MULTILINE)
        )
        self.operator.send_signal(signal.SIGINT)
        while not (said := re.findall(r"`perennial (stop .*?)`", self.said.read_text())):
            time.sleep(1.0)
        words = said[-1].split()
        subprocess.run([*PERENNIAL, *words], env=environment(), capture_output=True, check=False)
        return rounds

    def register(self) -> None:
        """Every site's key, once the SuperLink answers."""
        where = ["--superlink", f"127.0.0.1:{self.control}", "--ca", str(self.certs / "ca.crt")]
        command = [*PERENNIAL, "register", str(self.certs / "sites"), *where]
        while subprocess.run(command, capture_output=True, env=environment(), check=False).returncode:
            time.sleep(2.0)

    def round(self) -> int:
        """The last round in the log."""
        try:
            rows, _ = RunFolder(self.out).rows_after(0)
        except OSError:
            return 0
        return max((row["round"] for row in rows if row["kind"] == "round"), default=0)

    def wait(self, seconds: float) -> None:
        """Let time pass, as long as the run goes on."""
        self.over.wait(seconds)

    # ------------------------------------------------------------------ what people read

    def logs(self) -> dict[Path, int]:
        """The files that operator and sites' owners read, and their length."""
        files = [self.said, *(self.folder / f"site-{site}.log" for site in range(self.sites))]
        return {file: file.stat().st_size if file.exists() else 0 for file in files}

    def told(self, before: dict[Path, int]) -> list[str]:
        """What they were told since, but for the course of rounds."""
        lines = list[str]()
        for file, start in before.items():
            text = file.read_bytes()[start:].decode(errors="replace") if file.exists() else ""
            lines += [f"{file.stem}: {line}" for line in re.split(r"[\r\n]+", text) if line.strip()]
        quiet = re.compile(r"round +\d+: |^operator: +\d+ ")
        return list(dict.fromkeys(line for line in lines if not quiet.search(line)))


# ---------------------------------------------------------------------- faults

Fault = Callable[[World], None]


def kills(kind: str, below: str = "site") -> Fault:
    """`kill -9` of one process of a kind, at any site or below a service."""

    def fault(world: World) -> None:
        service = f"site-{world.draw.randrange(2, world.sites)}" if below == "site" else below
        for pid in world.pids(kind, service)[:1]:
            os.kill(pid, signal.SIGKILL)

    return fault


def hangs(kind: str, below: str = "site") -> Fault:
    """SIGSTOP for a minute."""

    def fault(world: World) -> None:
        service = f"site-{world.draw.randrange(world.sites)}" if below == "site" else below
        stopped = [pid for own in kind.split("+") for pid in world.pids(own, service)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        world.wait(HANGS)
        for pid in stopped:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)

    return fault


def breaks(mood: str) -> Fault:
    """A proxy breaks what it passes on, at one site or at all of them, for a while."""

    def fault(world: World) -> None:
        sites = [world.draw.randrange(world.sites)] if world.draw.random() < 0.5 else range(world.sites)
        world.proxies.mood = dict.fromkeys(sites, mood)
        world.wait(20.0 if mood != "holds" else HANGS)
        world.proxies.mood = {}

    return fault


def fills(name: str) -> Fault:
    """A disk is full for half a minute."""

    def fault(world: World) -> None:
        if world.folder / name not in world.disks:
            sys.exit("no disk could be mounted here; leave the faults `full …` out with --only")
        filler = world.folder / name / "filler"
        words = ["dd", "if=/dev/zero", f"of={filler}", "bs=1k"]
        subprocess.run(words, capture_output=True, check=False)
        world.wait(30.0)
        filler.unlink()

    return fault


def jumps(clock: str, by: int) -> Fault:
    """A clock is wrong for a minute."""

    def fault(world: World) -> None:
        if not world.clocks:
            sys.exit("no C compiler is here; leave the faults `clock …` out with --only")
        name = clock if clock == "server" else str(world.draw.randrange(world.sites))
        (world.folder / f"clock-{name}").write_text(f"{by}\n")
        world.wait(HANGS)
        (world.folder / f"clock-{name}").write_text("0\n")

    return fault


def forgets(world: World) -> None:
    """The SuperLink is killed, and its database is gone."""
    world.held.add("superlink")
    world.place.kill("superlink")
    for path in world.folder.glob("state.db*"):
        path.unlink()
    world.held.remove("superlink")
    world.register()


def certificate(world: World, until: timedelta) -> None:
    """A new certificate for the SuperLink, signed by the same CA, and a SuperLink that has it."""
    ca_key = load_pem_private_key((world.certs / "ca.key").read_bytes(), None)
    old = x509.load_pem_x509_certificate((world.certs / "server.crt").read_bytes())
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(old.not_valid_before_utc).not_valid_after(datetime.now(UTC) + until)
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    signed = builder.sign(ca_key, old.signature_hash_algorithm)  # type: ignore[arg-type]
    (world.certs / "server.crt").write_bytes(signed.public_bytes(Encoding.PEM))
    world.place.kill("superlink")


def expires(world: World) -> None:
    """The certificate ends: what is open goes on, new connections do not; after two minutes there is a new one."""
    certificate(world, timedelta(seconds=60))
    world.wait(70.0)
    world.proxies.mood = dict.fromkeys(range(world.sites), "cuts")
    world.wait(5.0)
    world.proxies.mood = {}
    world.wait(HANGS)
    certificate(world, timedelta(days=60))


FAULTS: dict[str, Fault] = {
    "kill superlink": kills("flower-superlink", "superlink"),
    "kill superexec": kills("flower-superexec", "superexec"),
    "kill serverapp": kills("flwr-serverapp", "superexec"),
    "kill join": kills("join"),
    "kill supernode": kills("flower-supernode"),
    "kill executor": kills("executor"),
    "forget": forgets,
    "hang superlink": hangs("flower-superlink", "superlink"),
    "hang superexec": hangs("flower-superexec", "superexec"),
    "hang serverapp": hangs("flwr-serverapp", "superexec"),
    "hang site": hangs("join+flower-supernode+executor"),
    "hang join": hangs("join"),
    "hang supernode": hangs("flower-supernode"),
    "hang executor": hangs("executor"),
    **{f"proxy {mood}": breaks(mood) for mood in MOODS},
    "full run folder": fills("disk"),
    "full state": fills("state-1"),
    "clock of a site +1 day": jumps("site", DAY),
    "clock of a site -1 day": jumps("site", -DAY),
    "clock of the server +1 day": jumps("server", DAY),
    "clock of the server -1 day": jumps("server", -DAY),
    "certificate": expires,
}


def bad_luck(world: World, names: Sequence[str], minutes: float) -> Counter[str]:
    """One fault after the other until the time is over, or the run is; how often each was."""
    done, deck, end = Counter[str](), list[str](), time.monotonic() + 60 * minutes
    with (world.folder / "events.txt").open("a") as events:
        while time.monotonic() < end and not world.over.is_set():
            if not deck:
                deck = list(names)
                world.draw.shuffle(deck)
            name, before, round_before = deck.pop(), world.logs(), world.round()
            print(f"{time.strftime('%H:%M:%S')} round {round_before}: {name}", file=events, flush=True)
            FAULTS[name](world)
            mended, reached = time.monotonic(), world.round()
            while world.round() < reached + 2 and not world.over.is_set():
                if time.monotonic() - mended > PATIENCE:
                    world.lost = f"after {name} the run did not go on"
                    print(world.lost, file=events, flush=True)
                    world.over.set()
                world.wait(2.0)
            print(f"  goes on after {time.monotonic() - mended:.0f} s", file=events)
            told = world.told(before)
            print(*(f"  {line}" for line in told), sep="\n", file=events, flush=True)
            if any(word in line for line in told for word in ERRORS):
                world.lost = world.lost or f"somebody was shown a traceback after {name}"
            done[name] += 1
    return done


# ---------------------------------------------------------------------- at the end


def plot(world: World) -> None:
    """Memory over time: the largest process of each kind, as a table and a figure."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "perennial"
    from matplotlib import pyplot

    lines: dict[str, dict[int, float]] = {}
    for process, points in world.memory.items():
        of_kind = lines.setdefault(process.kind, {})
        for now, mib in points:
            at = int(now - world.begun)
            of_kind[at] = max(mib, of_kind.get(at, 0.0))
    with (world.folder / "memory.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["seconds", "kind", "mib"])
        table.writerows([at, kind, f"{mib:.1f}"] for kind, own in lines.items() for at, mib in sorted(own.items()))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for kind, own in lines.items():
        axes.plot([at / 60 for at in sorted(own)], [own[at] for at in sorted(own)], label=kind)
    axes.set(xlabel="minutes", ylabel="resident MiB, largest of the kind", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(world.folder / "memory.svg", metadata={"Date": None})


def growth(world: World) -> dict[str, float]:
    """By kind, the largest ratio of a long-lived process's least memory in its last quarter to that in its second.

    At work memory goes up and down; what is never given back raises the least.
    """
    found: dict[str, float] = {}
    for process, points in world.memory.items():
        first, last = points[0][0], points[-1][0]
        quarter = (last - first) / 4
        if last - first < LEAST_LIFE:
            continue
        begin = min(mib for now, mib in points if first + quarter <= now < first + 2 * quarter)
        end = min(mib for now, mib in points if now >= last - quarter)
        found[process.kind] = max(end / begin, found.get(process.kind, 0.0))
    return found


def compare(out: Path, quiet: Path, rounds: int) -> list[str]:
    """What of a run is not as in the undisturbed one."""
    wrong = list[str]()
    rows, others = (RunFolder(place).rows() for place in (out, quiet))
    mine = [row["round"] for row in rows if row["kind"] == "round"]
    if mine != list(range(1, rounds + 1)):
        wrong.append(f"the log's rounds are {mine[:3]} … {mine[-3:]}, {len(mine)} of {rounds}")
    wrong += [f"round {row['round']}: left out {row['left_out']}" for row in rows if row.get("left_out")]
    evaluations = [[row for row in own if row["kind"] == "evaluation"] for own in (rows, others)]
    if evaluations[0] != evaluations[1]:
        wrong.append("evaluations differ")
    for file in sorted((quiet / "models").glob("*.safetensors")):
        one, other = load_file(out / "models" / file.name), load_file(file)
        if one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one):
            wrong.append(f"{file.name} differs")
    return wrong


def main() -> int:
    """Run, and say how it went."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which a shell turns off for what is in the background
    settings = [f"scenario.clients={wish.sites}", "scenario.train_per_class=20", "evaluate_every=25"]
    settings += ["checkpoint_every=1", "wait=600", "quorum=1", "deadline=90"]
    options = {"method": "ditto", "scenario": "colored-digits", "model": "logistic", "rounds": wish.rounds}
    config = load_config(options=options, settings=settings)
    wish.folder.mkdir(parents=True)
    (wish.folder / "run.toml").write_text(config.toml())
    world = World(wish)
    world.disk("state-1")
    world.proxies.start()
    done = Counter[str]()
    try:
        keeper = Thread(target=world.keep)
        keeper.start()
        world.register()
        world.follow("run")
        while world.round() < 2 and not world.over.is_set():
            world.wait(1.0)
        if wish.luck:
            done = bad_luck(world, wish.only.split(",") if wish.only else list(FAULTS), wish.minutes)
            if not world.over.is_set():
                wish.rounds = world.end_early()
        keeper.join()
        seconds = time.monotonic() - world.begun
    finally:
        world.over.set()
        if world.out.exists():
            shutil.copytree(world.out, wish.folder / "run")
        with world.place:
            pass
        if world.operator:
            world.operator.kill()
        for place in world.disks:
            subprocess.run(["umount", "-l", str(place)], check=False)
    plot(world)
    wrong = [world.lost] if world.lost else []
    if not wrong:
        config = config.model_copy(update={"rounds": wish.rounds})
        LocalRuntime(config).run(RunFolder.create(wish.folder / "quiet", config))
        wrong += compare(wish.folder / "run", wish.folder / "quiet", wish.rounds)
    grown = growth(world)
    wrong += [f"{kind} has grown {ratio:.2f} times" for kind, ratio in grown.items() if ratio > GROWTH]
    print(f"{wish.rounds} rounds, {wish.sites} sites, {seconds / 60:.0f} minutes, resumed {world.resumed} times")
    print("faults:", dict(done) or "none")
    print("memory, last to second quarter:", {kind: round(ratio, 3) for kind, ratio in grown.items()})
    print(*(wrong or ["arrays and evaluations are those of the quiet run; nothing is lost"]), sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--luck", action="store_true", help="draw faults")
    parser.add_argument("--only", default="", help="these faults alone, with commas between them")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="how long faults are drawn; then the run ends early"
    )
    wish = parser.parse_args()
    sys.exit(main())
