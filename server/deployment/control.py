"""What a SuperLink has: its runs and sites, asked and set over the Control API."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perennial.common.flower.control_api import key_bytes, runs_in, status_of
from perennial.common.flower.names import Run
from perennial.common.utils.errors import UserError
from perennial.common.utils.parsing import from_json
from perennial.server.deployment.certs import public_key
from perennial.server.deployment.submission import Connection

SHUT_OUT = "unregistered"
"""Flower's word for a node that no longer may join. It keeps the key, and never takes it again."""


@dataclass(frozen=True)
class RunState:
    """A run as the SuperLink knows it."""

    run: str
    """Flower's id, which `perennial stop` takes."""
    status: str
    what: str
    """Method on scenario, rounds and seed, of runs that `perennial run` has started; `survey`; else the app."""
    started: str


@dataclass(frozen=True)
class SiteState:
    """A SuperNode that has joined or is registered."""

    site: str
    """Name of the public key that it has; empty where none was given."""
    node: str
    status: str
    since: str
    """When it joined, or was last there; empty for one that has never been."""


def runs(connection: Connection) -> list[RunState]:
    """All runs, the newest first. Raises `UserError`."""
    return [RunState(str(run.run_id), status_of(run), _what(run), run.pending_at) for run in _runs(connection)]


def going_on(connection: Connection) -> Run | None:
    """The newest run that goes on, with the settings that it was started with. Raises `UserError`."""
    return next((run for run in _runs(connection) if status_of(run) == "running"), None)


def sites(connection: Connection, keys: Iterable[Path] = ()) -> list[SiteState]:
    """All SuperNodes that are not shut out, those online first; keys name them. Raises `UserError`, `OSError`."""
    names = {_as_known(key): key.stem for key in keys}
    found = [
        SiteState(
            names.get(node.public_key, ""),
            str(node.node_id),
            node.status,
            node.last_activated_at if node.status == "online" else node.last_deactivated_at,
        )
        for node in _nodes(connection)
        if node.status != SHUT_OUT
    ]
    return sorted(found, key=lambda node: (node.status != "online", node.site, node.node))


def register(connection: Connection, keys: Iterable[Path]) -> Iterator[str]:
    """Let the sites with these public keys in, one by one; of each its node id, or "" where it was let in before.

    Raises `UserError` for a key that was shut out, or is none; `OSError` where it is not there.
    """
    known = {node.public_key: node.status for node in _nodes(connection)}
    for key in keys:
        own = _as_known(key)
        if known.get(own) == SHUT_OUT:
            raise UserError(
                f"{key} was shut out, and a SuperLink never takes a key again; make the site a new one "
                "(`perennial certs DIR --add --name NAME`)"
            )
        if own in known:
            yield ""
        else:
            known[own] = "registered"
            yield str(connection.ask("RegisterNode", public_key=own).node_id)


def unregister(connection: Connection, keys: Sequence[Path]) -> list[str]:
    """Shut the sites with these public keys out, for good; their node ids.

    Raises `UserError` where one of them was not let in, and then shuts none out; `OSError` where one is not there.
    """
    known = {node.public_key: node.node_id for node in _nodes(connection) if node.status != SHUT_OUT}
    nodes = []
    for key in keys:
        if (own := _as_known(key)) not in known:
            raise UserError(f"{key} is not registered, so nobody was shut out; `perennial status` lists the sites")
        nodes.append(known[own])
    for node in nodes:
        connection.ask("UnregisterNode", node_id=node)
    return list(map(str, nodes))


def stop(connection: Connection, run: str) -> None:
    """End a run. Raises `UserError` where there is none of this id, or it has ended."""
    if not (run.isdecimal() and run.isascii()) or int(run) >= 2**64:
        raise UserError(f"{run!r:.80} is no run; `perennial status` lists them")
    if not connection.ask("StopRun", run_id=int(run)).success:
        raise UserError(f"run {run} was not stopped; `perennial status` says how it is")


def _as_known(key: Path) -> bytes:
    """A site's public key as a SuperLink knows it. Raises as `public_key` does."""
    return key_bytes(public_key(key))


def _runs(connection: Connection) -> list[Run]:
    return sorted(runs_in(connection.ask("ListRuns")), key=lambda run: run.pending_at, reverse=True)


def _nodes(connection: Connection) -> Sequence[Any]:
    found: Sequence[Any] = connection.ask("ListNodes").nodes_info
    return found


def _what(run: Run) -> str:
    if run.override_config.get("survey"):
        return "survey"
    try:
        config = from_json(str(run.override_config["config"]))
        method, scenario = (config[part]["name"] for part in ("method", "scenario"))
        return f"{method} on {scenario}, {config['rounds']} rounds, seed {config['seed']}"
    except (KeyError, ValueError, TypeError):
        return f"{run.fab_id} {run.fab_version}"
