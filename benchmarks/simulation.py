"""What Flower's simulation costs beside the local runtime: seconds to start, and milliseconds of a message.

    uv run python benchmarks/simulation.py [REPEATS]

Runs of FedAvg on `colored-digits` with 2 and with 42 rounds, on both runtimes in turn; wall seconds of the whole
command, medians. A message costs what the 40 further rounds of 8 clients take longer than locally. Wall time is
what somebody waits for, so run it on a machine that does nothing else.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SHORT, LONG, CLIENTS = 2, 42, 8
ONCE = ["--set", "evaluate_every=1000", "--set", "checkpoint_every=1000"]


def seconds(runtime: str, rounds: int) -> float:
    """Of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("perennial")), "run", "--method", "fedavg"]
        command += ["--scenario", "colored-digits", "--rounds", str(rounds), "--runtime", runtime]
        begun = time.monotonic()
        subprocess.run([*command, *ONCE, "--out", f"{folder}/run"], capture_output=True, check=True)
        return time.monotonic() - begun


def main() -> None:
    """Print a table."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    cases = [(runtime, rounds) for runtime in ("local", "simulation") for rounds in (SHORT, LONG)]
    taken = {case: [seconds(*case)] for case in cases}
    for _ in range(repeats - 1):
        for case in cases:
            taken[case].append(seconds(*case))
    found = {case: median(times) for case, times in taken.items()}
    for (runtime, rounds), value in found.items():
        print(f"{runtime}, {rounds} rounds: {value:.1f} s")
    later = {rounds: found["simulation", rounds] - found["local", rounds] for rounds in (SHORT, LONG)}
    print(f"start above local: {later[SHORT]:.1f} s")
    print(
        f"a message beyond its training: {1000 * (later[LONG] - later[SHORT]) / (LONG - SHORT) / CLIENTS:.1f} ms"
    )


if __name__ == "__main__":
    main()
