"""Files that a stranger may have written, made by hypothesis from honest ones; and who reads them."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from tiny_runs import broken_off
from typer.testing import CliRunner

from perennial.client.node.policy import read_policy
from perennial.client.serving.access import read_tokens
from perennial.common.models.settings import ResNet18
from perennial.common.models.weights import load_weights
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.references import load_references
from perennial.testing.tiny_federation import toy_config

SCENARIO = {"name": "toy", "samples": 8}
VICTIM = "not to be changed\n"
LARGEST = 8 << 20
"""Bytes of a file that is made here; what it expands to may be more."""

# ---------------------------------------------------------------------- what may be wrong with any file

VALUES: Sequence[Any] = [
    *(None, True, -1, 0, 10**30, 2**63, -(2**63), 1e308, 5e-324, float("nan"), float("inf")),
    *("", " ", "\0", "../../etc/passwd", "\x1b[2J\x1b]0;title\x07", "\u202eabc", "<script>alert(1)</script>"),
    *("[/][bold]", "9" * 5000, "x" * 100_000, [], {}, [[]], {"": None}, [1, "a"], {"a": {"b": 1}}),
]
BYTES = [
    *(b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n" * 1000, b"," * 10_000, b'"', b"\r", b"-", b"nan", b"1e999"),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"a = " + b"[" * 50_000, b"9" * 5000, b"\x1b[2J"),
    *(b"\x80\x04\x95.", b"PK\x03\x04", b"PAR1", (2**63 - 1).to_bytes(8, "little")),
]


@st.composite
def hostile_bytes(draw: st.DrawFn, honest: bytes) -> bytes:
    """The bytes of a file of which a part is cut, changed, doubled or replaced."""
    data = honest
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 2, 8, 64, len(data)])))
        kind = draw(st.sampled_from(["cut", "flip", "insert", "replace", "double", "end"]))
        if kind == "cut":
            data = data[:start] + data[end:]
        elif kind == "flip" and start < len(data):
            data = data[:start] + bytes([data[start] ^ draw(st.integers(1, 255))]) + data[start + 1 :]
        elif kind == "insert":
            data = data[:start] + draw(st.sampled_from(BYTES)) + data[start:]
        elif kind == "replace":
            data = data[:start] + draw(st.sampled_from(BYTES)) + data[end:]
        elif kind == "double":
            data = data[:end] + data[start:end] * draw(st.sampled_from([1, 2, 100])) + data[end:]
        else:
            data = data[:start]
        data = data[:LARGEST]
    return data


def changed(draw: st.DrawFn, value: Any) -> Any:
    """JSON of which one part is another value, is missing, or is new."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        other = {own: part for own, part in value.items() if own != key}
        how = draw(st.sampled_from(["inside", "inside", "inside", "missing", "renamed"]))
        if how == "inside":
            other[key] = changed(draw, value[key])
        elif how == "renamed":
            other[str(draw(st.sampled_from(VALUES)))] = value[key]
        return other
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], changed(draw, value[place]), *value[place + 1 :]]
    return draw(st.sampled_from(VALUES))


@st.composite
def hostile_text(draw: st.DrawFn, honest: bytes) -> bytes:
    """A line of JSON, or a whole file of it, with another value in it."""
    lines = honest.decode().splitlines()
    if len(lines) > 1 and lines[0].strip() == "{":
        return json.dumps(changed(draw, json.loads(honest))).encode()
    place = draw(st.integers(0, len(lines) - 1))
    lines[place] = json.dumps(changed(draw, json.loads(lines[place])))
    return "\n".join(lines).encode() + b"\n"


@st.composite
def hostile_safetensors(draw: st.DrawFn, honest: bytes) -> bytes:
    """A file of tensors whose header says something else, or whose values are not possible."""
    size = int.from_bytes(honest[:8], "little")
    header, body = json.loads(honest[8 : 8 + size]), bytearray(honest[8 + size :])
    if draw(st.booleans()):
        header = changed(draw, header)
    elif len(body) >= 4:
        place = draw(st.integers(0, len(body) // 4 - 1)) * 4
        body[place : place + 4] = np.float32(draw(st.sampled_from([np.nan, np.inf, 3e38, 5e-45]))).tobytes()
    text = json.dumps(header).encode()
    return (draw(st.sampled_from([len(text), len(text), 2**40, 0]))).to_bytes(8, "little") + text + bytes(body)


OF_KIND = {".json": hostile_text, ".jsonl": hostile_text, ".safetensors": hostile_safetensors}


def hostile(name: str, honest: bytes) -> st.SearchStrategy[bytes]:
    """What may stand in the file of this name."""
    of_kind = OF_KIND.get(Path(name).suffix) if honest.strip() else None
    return hostile_bytes(honest) | of_kind(honest) if of_kind else hostile_bytes(honest)


# ---------------------------------------------------------------------- who reads them


@dataclass(frozen=True)
class Reader:
    """A folder of honest files, and what is done with it."""

    name: str
    files: Callable[[Path], None]
    """Writes them."""
    read: Callable[[Path], None]
    """Ends, or raises `UserError`."""


def command(*words: str) -> Callable[[Path], None]:
    """A command, with the folder in the place of `{}`; it may end well, or in one sentence."""

    def read(folder: Path) -> None:
        result = CliRunner().invoke(app, [word.replace("{}", str(folder)) for word in words])
        if result.exit_code not in (0, 2, 3):
            raise AssertionError(f"exit code {result.exit_code}: {result.output[-2000:]}") from result.exception
        assert "Traceback" not in result.output
        assert "\x1b[2J" not in result.output
        assert "\x1b]0" not in result.output
        if result.exit_code:
            raise UserError(result.output)

    return read


def _run_folder(folder: Path) -> None:
    config = toy_config(
        "ditto", "local_steps=1", "evaluate_every=1", rounds=2, scenario={"name": "toy", "samples": 8}
    )
    LocalRuntime(config).run(RunFolder.create(folder, config))


def _table(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    return {
        "age": random.normal(50, 8, 40).round(1),
        "pain": random.choice(["typical", "none"], 40),
        "label": random.choice(["ill", "well"], 40),
    }


def _csv(folder: Path) -> None:
    columns = _table(folder)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (folder / "site.csv").write_text("\n".join(lines) + "\n")


def _parquet(folder: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table(_table(folder)), folder / "site.parquet")


def _npz(folder: Path) -> None:
    folder.mkdir(parents=True)
    np.savez(folder / "site.npz", x=np.ones((40, 3), np.float32), y=np.arange(40) % 2)


def _pictures(folder: Path) -> None:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(folder / label / f"{number}.png")


def _text(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / name).write_text(text)

    return write


def _config(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(toy_config("ditto", rounds=1).toml())


def _broken_off(folder: Path) -> None:
    config = toy_config(
        "fedavg", "local_steps=1", "checkpoint_every=1", rounds=3, scenario={"name": "toy", "samples": 8}
    )
    broken_off(config, folder, after=2)


def _references(folder: Path) -> None:
    config = toy_config("references", "local_steps=1", rounds=1, scenario=SCENARIO)
    LocalRuntime(config).run(RunFolder.create(folder, config))
    for other in [entry for entry in folder.iterdir() if entry.name != "models"]:
        shutil.rmtree(other) if other.is_dir() else other.unlink()


def _read_references(folder: Path) -> None:
    file = folder / "models" / "references.safetensors"
    load_references(toy_config("fedavg", f"references={file}", scenario=SCENARIO))


def _safetensors(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file({"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)}, folder / "w.safetensors")


def _pt(folder: Path) -> None:
    folder.mkdir(parents=True)
    torch.save({"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)}, folder / "w.pt")


def _weights(folder: Path) -> None:
    file = next(folder.iterdir(), folder / "none")
    digest = sha256(file.read_bytes()).hexdigest() if file.is_file() else "0" * 64
    load_weights(ResNet18(weights=str(file), digest=digest))


EXPORT = ("export", "{}", "--model", "global")
READERS = [
    Reader("show", _run_folder, command("show", "run", "{}")),
    Reader("show as JSON", _run_folder, command("show", "run", "{}", "--json")),
    Reader("report", _run_folder, command("report", "{}")),
    Reader("report as Markdown", _run_folder, command("report", "{}", "--format", "markdown")),
    Reader("resume", _broken_off, command("resume", "{}")),
    Reader("watch", _run_folder, command("watch", "{}")),
    Reader("export", _run_folder, command(*EXPORT, "--format", "torch", "--out", "{}/out.safetensors")),
    Reader("configuration", _config, command("run", "--config", "{}/run.toml", "--out", "{}/run")),
    Reader("describe CSV", _csv, command("describe", "{}/site.csv")),
    Reader("describe Parquet", _parquet, command("describe", "{}/site.parquet")),
    Reader("describe NPZ", _npz, command("describe", "{}/site.npz")),
    Reader("describe pictures", _pictures, command("describe", "{}")),
    Reader(
        "policy",
        _text("policy.toml", 'servers = ["a:9092"]\nmethods = ["fedavg"]\nmax_rounds = 3\nrequire = "secagg"\n'),
        lambda folder: read_policy.__wrapped__(str(folder / "policy.toml")) and None,
    ),
    Reader(
        "tokens",
        _text("tokens", "north " + "a1" * 32 + "\n"),
        lambda folder: read_tokens(folder / "tokens") and None,
    ),
    Reader("references", _references, _read_references),
    Reader("weights as safetensors", _safetensors, _weights),
    Reader("weights of torch.save", _pt, _weights),
]  # fmt: skip


def judge(reader: Reader, data: Any, place: Path) -> str:
    """Let one reader read its files with one of them spoilt: whether they were `read` or `refused`.

    What is raised but a `UserError` is an error, and so is a new file beside the folder.
    """
    honest, folder = place / "honest" / reader.name, place / "now"
    if not honest.exists():
        reader.files(honest)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(honest, folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    (victim := place / "victim").write_text(VICTIM)
    file = data.draw(st.sampled_from(files))
    kind = data.draw(st.sampled_from([*["bytes"] * 12, "missing", "folder", "loop", "elsewhere"]))
    spoilt = data.draw(hostile(file.name, file.read_bytes())) if kind == "bytes" else b""
    file.unlink()
    if kind == "bytes":
        file.write_bytes(spoilt)
    elif kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "elsewhere":
        file.symlink_to(victim)
    try:
        reader.read(folder)
    except UserError:
        return "refused"
    finally:
        assert {entry.name for entry in place.iterdir()} == {"honest", "now", "victim"}, "a file beside the folder"
        assert victim.read_text() == VICTIM
    return "read"
