"""The files in docker/: what holds of them without an engine, and, with PERENNIAL_E2E=1, that they work."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from perennial.client.node.join import SiteMetrics
from perennial.client.serving.metrics import ServingMetrics
from perennial.server.cli.main import app
from perennial.server.run.prometheus import RunMetrics

PROJECT = Path(__file__).parents[2]
DOCKERFILE = (PROJECT / "docker" / "Dockerfile").read_text()
FILES = {
    "plain": ["compose.yml"],
    "secure": ["compose.yml", "compose.secure.yml"],
    "edge": ["compose.edge.yml"],
    "monitored": ["compose.yml", "compose.monitoring.yml"],
}
SITE = {
    "PERENNIAL_SUPERLINK": "server.example:9092",
    "SITE_NAME": "north",
    "SITE_DATA": "/srv/data",
    "SITE_KEY": "/keys/north",
    "SITE_CA": "/keys/ca.crt",
}


@cache
def compose() -> list[str]:
    """Compose as a command; empty where there is none, which a docker without its plugin says in its own ways."""
    for command in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
            return command
    return []


def services(name: str, **environment: str) -> dict[str, Any]:
    """The services of some compose files, as Compose itself puts them together."""
    command = [*compose()]
    if not command:
        pytest.skip("needs docker-compose, or docker with its compose plugin")
    for file in FILES[name]:
        command += ["-f", str(PROJECT / "docker" / file)]
    done = subprocess.run([*command, "config"], env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(yaml.safe_load(done.stdout)["services"])


@pytest.mark.parametrize("name", FILES)
def test_every_service_is_watched_restarted_and_unprivileged(name: str) -> None:
    for service, settings in services(name, **SITE).items():
        assert settings["cap_drop"] == ["ALL"], service
        assert settings["logging"]["options"] == {"max-size": "10m", "max-file": "3"}, service
        if service != "register":  # runs once
            assert settings["restart"] == "unless-stopped", service
        if service in ("prometheus", "grafana"):  # others' images, whose users have no rights
            assert all("127.0.0.1" in str(port) for port in settings["ports"]), service
            continue
        assert settings["user"] == "10001", service
        if service != "register":
            assert "health.py" in str(settings["healthcheck"]["test"]), service


def test_every_client_has_its_partition_and_its_volume() -> None:
    clients = {name: settings for name, settings in services("plain").items() if name.startswith("client-")}
    assert len(clients) == 4
    for name, settings in clients.items():
        number = name.removeprefix("client-")
        assert settings["command"] == f"perennial join --partition {number}"
        assert settings["environment"]["PERENNIAL_STATE"] == "/state"
        assert str(settings["volumes"]).count(f"state-{number}") == 1


def test_secure_means_no_plaintext_one_open_port_and_no_key_of_another() -> None:
    found = services("secure")
    assert [name for name, settings in found.items() if settings.get("ports")] == ["superlink"]
    assert len(found["superlink"]["ports"]) == 1
    for name, settings in found.items():
        assert "--insecure" not in settings["command"]
        assert settings.get("environment", {}).get("PERENNIAL_INSECURE", "0") == "0"
        secrets = {secret["source"] for secret in settings["secrets"]}
        assert "ca.key" not in secrets
        private = {secret for secret in secrets if re.fullmatch(r"site-\d", secret)}
        assert private == ({f"site-{int(name[-1]) + 1}"} if name.startswith("client-") else set())
        assert ("control" in settings["networks"]) == (name in {"superlink", "server", "register"})


@pytest.mark.parametrize("setting", SITE)
def test_a_site_must_say_who_and_where_it_is(setting: str) -> None:
    with pytest.raises(AssertionError, match=f"{setting}"):
        services("edge", **{name: value for name, value in SITE.items() if name != setting})


def test_a_site_has_its_gpu_and_data_that_it_cannot_change() -> None:
    site = services("edge", **SITE, SITE_FILE="cells.csv")["site"]
    assert site["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert "/srv/data:/data:ro" in str(site["volumes"])
    assert "--data /data/cells.csv " in site["command"]


def test_image_rules() -> None:
    lines = DOCKERFILE.splitlines()
    assert not re.search(r"https?://|syntax=", DOCKERFILE)
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001"]
    assert DOCKERFILE.index("COPY requirements.lock") < DOCKERFILE.index("COPY . /app")
    assert DOCKERFILE.count("--require-hashes") == 2
    kept = (PROJECT / ".dockerignore").read_text().split("\n\n")[-1].split("\n")
    assert "*" in kept, "nothing is copied that is not named"
    named = {line.removeprefix("!") for line in kept if line.startswith("!")}
    assert all((PROJECT / name).exists() for name in named)
    assert not named & {"data", "runs", "docker", "docker/certs", ".git", "tests"}


def test_another_torch_leaves_the_rest_of_the_lock_as_it_is() -> None:
    program = re.search(r"awk '(.*?)'", DOCKERFILE)
    pattern = re.search(r"grep -oE '(.*?)'", DOCKERFILE)
    assert program
    assert pattern
    lock = (PROJECT / "requirements.lock").read_text()
    rest = subprocess.run(["awk", program[1]], input=lock, capture_output=True, text=True, check=True).stdout
    taken = subprocess.run(
        ["grep", "-oE", pattern[1]], input=lock, capture_output=True, text=True, check=True
    ).stdout
    names = [set(re.findall(r"(?m)^[a-z][a-z0-9-]*", text)) for text in (lock, rest)]
    gone = names[0] - names[1]
    assert {"torch", "torchvision", "triton"} <= gone
    assert all(re.match(r"torch|triton|nvidia-|cuda-", name) for name in gone)
    assert [line.split("==")[0] for line in taken.splitlines()] == ["torch", "torchvision"]


def test_health(monkeypatch: pytest.MonkeyPatch) -> None:
    health, server = HealthServicer(), grpc.server(ThreadPoolExecutor(1))
    add_HealthServicer_to_server(health, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    def check() -> tuple[int, str]:
        """Exit code and complaints of a process of its own, as in the engine: its alarm would end the tests."""
        command = [sys.executable, str(PROJECT / "docker" / "health.py"), address]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stderr

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # as an engine may give to its containers
    try:
        assert check() == (0, "")
        health.set("", HealthCheckResponse.NOT_SERVING)
        assert check() == (1, "")
    finally:
        server.stop(None).wait()
    code, complaint = check()
    assert code == 1
    assert "RpcError" in complaint


@pytest.mark.runtimes
@pytest.mark.skipif(os.environ.get("PERENNIAL_E2E") != "1", reason="takes minutes; PERENNIAL_E2E=1 asks for it")
def test_end_to_end() -> None:
    subprocess.run([PROJECT / "docker" / "e2e"], check=True)


def test_alarms_and_dashboard_ask_for_metrics_that_there_are(tmp_path: Path) -> None:
    site, serving = SiteMetrics().registry, ServingMetrics().registry
    run = CollectorRegistry()
    run.register(RunMetrics(tmp_path / "log.jsonl", clients=True))
    families = [family for registry in (site, serving, run) for family in registry.collect()]
    kinds = {"counter": ("_total",), "histogram": ("_count", "_sum", "_bucket"), "gauge": ("",)}
    names = {family.name + ending for family in families for ending in kinds[family.type]}
    monitoring = PROJECT / "docker" / "monitoring"
    rules = yaml.safe_load((monitoring / "alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((monitoring / "dashboard.json").read_text())["panels"]
    queries = [rule["expr"] for rule in rules] + [one["expr"] for panel in panels for one in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"perennial_\w+", query)}
    assert len(asked) > 15
    assert asked <= names
    counted = {s.labels.get("code") for f in serving.collect() for s in f.samples if s.name.endswith("_total")}
    codes = re.findall(r'code=~?"(.*?)"', " ".join(rule["expr"] for rule in rules))
    assert codes
    assert set("|".join(codes).split("|")) <= counted  # from 0: a rate does not see that a counter appears
    page = (PROJECT / "docs" / "operating.md").read_text()
    assert {rule["alert"] for rule in rules} == set(re.findall(r"(?m)^\| `(Perennial\w+)`", page))
    written = {name for name in re.findall(r"`(perennial_\w+)", page)}
    assert written == {family.name + {"counter": "_total"}.get(family.type, "") for family in families}


def test_units_start_commands_that_there_are() -> None:
    """With options that they have."""
    for unit in sorted((PROJECT / "docker" / "systemd").glob("*.service")):
        [line] = re.findall(r"(?m)^ExecStart=/opt/perennial/.venv/bin/(\S+ ?[a-z]*)", unit.read_text())
        assert line.split()[0] in ("flower-superlink", "perennial")
        if line.startswith("perennial"):
            assert CliRunner().invoke(app, [line.split()[1], "--help"]).exit_code == 0
