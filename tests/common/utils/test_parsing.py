"""Text that somebody else wrote is a value, or a `ValueError`, which all who read it expect."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from perennial.client.node.policy import read_policy
from perennial.common.presets import read_presets
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import load_tensors
from perennial.common.utils.parsing import from_json, from_toml

DEEP = "[" * 50_000 + "]" * 50_000


def test_what_would_run_out_of_stack_is_a_value_error() -> None:
    assert from_json('{"a": [1]}') == {"a": [1]}
    assert from_toml("a = [1]") == {"a": [1]}
    for read, text in ((from_json, DEEP), (from_toml, f"a = {DEEP}")):
        with pytest.raises(ValueError, match="nested too deeply"):
            read(text)


def test_files_that_are_nested_too_deeply_get_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    file.write_text(f"methods = {DEEP}")
    for read in (lambda: read_policy(str(file)), lambda: read_presets(file)):
        with pytest.raises(UserError, match=r"deep.toml: it is nested too deeply"):
            read()
    save_file({"w": torch.ones(1)}, tmp_path / "w.safetensors", metadata={"names": DEEP})
    with pytest.raises(ValueError, match="nested too deeply"):
        load_tensors(tmp_path / "w.safetensors")
