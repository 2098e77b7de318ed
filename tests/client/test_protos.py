"""The generated code beside each .proto is what the pinned grpcio-tools make of it."""

from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTOS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "perennial" / "client").rglob("*.proto"))


@pytest.mark.parametrize("proto", PROTOS)
def test_the_generated_code_is_up_to_date(proto: str, tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{ROOT}", *outputs, proto]) == 0
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*"))
    assert len(made) == 3
    for path in made:
        assert (ROOT / path).read_text() == (tmp_path / path).read_text(), f"make it anew: see {proto}"
