"""Arrays that a program handed over: each site's in a file of its own, named after what is in it."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationInfo, field_validator
from safetensors import SafetensorError

from perennial.common.data.datasets import resolve_root
from perennial.common.data.environments import unit_range
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Scenario
from perennial.common.data.scenarios.own_data import Sites
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import load_records, save_records
from perennial.common.utils.knobs import knob
from perennial.common.utils.samples import SampleShape, group_of

if TYPE_CHECKING:
    from perennial.common.utils.tensors import Tensors

FOLDER = "arrays"
"""In the data root."""
TRAIN = "train"
"""The record of a site's own samples. Those of test environment number 3 are in the record `3`."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class PartOfSample(BaseModel):
    """A part of a sample that is a group."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: tuple[PositiveInt, ...] = Field(min_length=1)
    vocabulary: int = Field(default=0, ge=0)
    padded: bool = False

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """As a model has it."""
        return SampleShape(self.shape, self.vocabulary, self.padded) if self.vocabulary else self.shape


class Arrays(Sites):
    """Samples that `perennial.from_arrays` was given, in files of the data root.

    A site's file is named after the digest of its content, so a run has the data that it was configured with, or
    none. Where `tests` has names, every sample of a site is for training or held out.
    """

    title = "arrays that a program handed over (perennial.from_arrays)"
    source = "the caller"
    dataset = "arrays"

    name: Literal["arrays"] = "arrays"
    parts: tuple[Digest, ...] = knob(..., "digest of each site's arrays, in the order of the sites' names")
    tests: tuple[str, ...] = knob((), "names of the test environments; empty: a part of each site's own samples")
    group: dict[str, PartOfSample] = knob({}, "of a sample that is a group, its parts by name; empty: it is none")
    shared: Digest | Literal[""] = knob(
        "", "digest of the test samples that all sites have; empty: there are none"
    )

    @field_validator("parts")
    @classmethod
    def _one_each(cls, parts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if "sites" in info.data and len(parts) != len(info.data["sites"]):
            raise ValueError(f"there must be one for each of {len(info.data['sites'])} sites")
        return parts

    @property
    def input_shape(self) -> tuple[int, ...]:
        if not self.group:
            return super().input_shape
        return group_of({name: part.sample_shape for name, part in self.group.items()})

    @property
    def test_environments(self) -> tuple[str, ...]:
        return self.tests or self.environments

    def cannot_ask_sites(self) -> str:
        if not self.tests:
            return ""
        tests = ", ".join(self.tests)
        return f"arrays that are tested with {tests}, not with each site's own samples; make them without test"

    def lie_in(self, root: Path) -> bool:
        """Whether a data root has arrays of the scenario."""
        return any((root / FOLDER / f"{part}.safetensors").is_file() for part in self.parts)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        root, site = resolve_root(data_root), self.sites[client]
        records = self._read(root, self.parts[client], f"the arrays of {site}")
        if self.shared:
            records |= self._read(root, self.shared, "the test arrays of all sites")
        own = records[TRAIN]
        every = Examples(unit_range(own["x"]), own["y"], own["environment"])
        test = {}
        for number, name in enumerate(self.tests):
            if found := records.get(str(number)):
                x, y = unit_range(found["x"]), found["y"]
                test[name] = Examples(x, y, torch.full((len(y),), -1))
        divided = self.divide(site, seed, every)
        return ClientData(divided.train, divided.validation, {**divided.test, **test})

    def _read(self, root: Path | None, digest: str, what: str) -> "dict[str, Tensors]":
        """Records of a file whose content is as it was. Raises `UserError`."""
        if root is None:
            raise UserError(f"{what} are in no data root; give the folder that has {FOLDER}/{digest}.safetensors")
        path = root / FOLDER / f"{digest}.safetensors"
        try:
            records = load_records(path)
        except FileNotFoundError:
            raise UserError(
                f"{what} are not in {path}; "
                "give the data root that has them (data_root in the run's config.toml), or "
                "make the run again from Python"
            ) from None
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{what} in {path} cannot be read ({str(error)[:200]})") from None
        if digest_of(records) != digest:
            raise UserError(f"{what} in {path} are not those that the run was configured with")
        return records


def store(root: Path, records: "Mapping[str, Tensors]") -> None:
    """Write a site's records where `Arrays` looks for them, unless they are there."""
    path = root / FOLDER / f"{digest_of(records)}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_records(path, records)


def digest_of(records: "Mapping[str, Tensors]") -> str:
    """16 hex digits that change with every name, type, shape and number of the tensors."""
    found = sha256()
    for record, tensors in sorted(records.items()):
        for name, tensor in sorted(tensors.items()):
            found.update(f"{record}/{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            found.update(tensor.contiguous().numpy().data)
    return found.hexdigest()[:16]


PRESETS: dict[str, Scenario] = {}
