"""How much memory this process can have."""

from pathlib import Path

from perennial.common.utils.errors import UserError


def available() -> float:
    """Bytes that this process can have now, of the machine and its container; infinite where nobody says."""
    machine = _field(Path("/proc/meminfo"), "MemAvailable:")
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    # What a container's files have in memory counts as used, and can be taken back.
    cached = _field(group / "memory.stat", "inactive_file")
    return min(1024 * machine, limit - max(0.0, used - (0.0 if cached == float("inf") else cached)))


def _number(file: Path) -> float:
    try:
        return float(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return float("inf")


def _field(file: Path, name: str) -> float:
    try:
        found = [line.split()[1] for line in file.read_text().splitlines() if line.startswith(name)]
        return float(found[0])
    except (OSError, ValueError, IndexError):
        return float("inf")


def in_gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


def must_have(file: str, size: float) -> None:
    """Raises `UserError` if what a file unpacks to, `size` bytes, is more than this process can have.

    A file that repeats itself may be a thousandth of what is in it.
    """
    if size > (there := available()):
        raise UserError(
            f"{file} takes about {in_gb(size)} of memory here, and {in_gb(there)} are available; take fewer rows"
        )
