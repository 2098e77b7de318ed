import io
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from perennial.common.utils.tensors import Tensors
from perennial.common.wire import to_record
from perennial.strategies import screening
from perennial.strategies.screening import Rejected, Template, check_metrics, check_sizes
from perennial.testing.bad_replies import pickles
from perennial.testing.tiny_federation import toy_config

LIKE = {"w": torch.zeros(2, 3), "n": torch.tensor(0), "b": torch.zeros(3)}


LARGEST = 1e9
NO_ARRAY = "'model' cannot be decoded"


def accept(name: str, record: ArrayRecord | None, like: Template) -> Tensors:
    return screening.accept(name, record, like, LARGEST)


def good() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(2, 3), "n": torch.tensor(5), "b": torch.arange(3.0)}


def npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=True)
    return buffer.getvalue()


def with_bytes(data: bytes, shape: tuple[int, ...] = (3,), dtype: str = "float32") -> ArrayRecord:
    record = to_record(good())
    record["b"] = Array(dtype, shape, "numpy.ndarray", data)
    return record


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_a_good_reply_comes_out_in_the_templates_order() -> None:
    shuffled = {name: good()[name] for name in ("b", "w", "n")}
    for record in (to_record(shuffled), ArrayRecord({name: Array(t) for name, t in shuffled.items()})):
        found = accept("model", record, LIKE)
        assert list(found) == ["w", "n", "b"]
        assert all(torch.equal(found[name], good()[name]) for name in LIKE)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t.pop("b"), "'model' lacks b"),
        (lambda t: (t.pop("b"), t.pop("w")), "'model' lacks b and 1 more"),
        (lambda t: t.update(x=torch.zeros(1)), "'model' has unexpected x"),
        (lambda t: t.update(b=torch.zeros(4)), r"'model': b has shape \(4,\) instead of \(3,\)"),
        (lambda t: t.update(n=torch.zeros(1).long()), r"n has shape \(1,\) instead of \(\)"),
        (lambda t: t.update(b=torch.zeros(3).double()), "b has type float64 instead of float32"),
        (lambda t: t.update(n=torch.tensor(0.0)), "n has type float32 instead of int64"),
        (lambda t: t.update(b=torch.tensor([0, float("nan"), 0])), "'model' is not finite in b"),
        (lambda t: t.update(w=torch.full((2, 3), -float("inf"))), "'model' is not finite in w"),
        (lambda t: t.update(b=torch.tensor([float("inf"), -float("inf"), 0])), "not finite in b"),
    ],
)
def test_each_reason_names_the_tensor(spoil: Callable[[dict[str, torch.Tensor]], object], reason: str) -> None:
    tensors = good()
    spoil(tensors)
    for record in (to_record(tensors), ArrayRecord({name: Array(t) for name, t in tensors.items()})):
        with pytest.raises(Rejected, match=reason):
            accept("model", record, LIKE)


def test_a_missing_record_is_named() -> None:
    with pytest.raises(Rejected, match="record 'model' is missing"):
        accept("model", None, LIKE)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("b", torch.tensor([0, 1e30, 0]), r"b has the value 1e\+30, and largest=1e\+09 is the limit"),
        ("w", torch.full((2, 3), -1.1e9), r"w has the value -1.1e\+09"),
        ("b", torch.full((3,), 3e38), r"b has the value 3e\+38"),  # their sum is inf in float32
        ("n", torch.tensor(2**62), r"n has the value 4.61169e\+18"),
    ],
)
def test_a_finite_but_absurd_value_is_refused(key: str, value: torch.Tensor, word: str) -> None:
    with pytest.raises(Rejected, match=f"'model': {word}"):
        accept("model", to_record(good() | {key: value}), LIKE)


def test_the_largest_value_is_accepted() -> None:
    tensors = good() | {"b": torch.tensor([-LARGEST, LARGEST, 0])}
    assert torch.equal(accept("model", to_record(tensors), LIKE)["b"], tensors["b"])


def test_a_tensor_without_values_is_accepted() -> None:
    empty = {"e": torch.zeros(0, 3)}
    assert accept("model", to_record(empty), empty)["e"].shape == (0, 3)


@pytest.mark.parametrize(
    "lie",
    [
        npy(np.zeros(4, "f4")),
        npy(np.zeros((3, 1), "f4")),
        npy(np.zeros(3, "f8")),
        npy(np.zeros(3, "i4")),
        npy(np.array(1.0, "f4")),
    ],
)
def test_bytes_that_are_not_what_their_header_says_are_refused(lie: bytes) -> None:
    with pytest.raises(Rejected, match=NO_ARRAY):
        accept("model", with_bytes(lie), LIKE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04no array",
        b"PK\x03\x04" + bytes(50),  # numpy: BadZipFile
        npy(np.zeros(3, "f4"))[:-1],
        npy(np.zeros(3, ">f4")),
        npy(np.array(["a", "b", "c"])),
        npy(np.array([None, 1, "x"], dtype=object)),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000000,), }"),  # MemoryError
        header("{'descr': (((("),  # TokenError
        header("{'descr': ',', 'fortran_order': False, 'shape': (3,), }"),  # SyntaxError
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,), }"),
    ],
)
def test_bytes_that_are_no_array_are_refused_whatever_numpy_raises(data: bytes) -> None:
    with pytest.raises(Rejected, match=NO_ARRAY):
        accept("model", with_bytes(data), LIKE)


def test_what_a_header_says_costs_no_memory() -> None:
    """numpy makes room for as many values as a header says before it looks for them."""
    data = header("{'descr': '<f4', 'fortran_order': False, 'shape': (50000000,), }")
    tracemalloc.start()
    with pytest.raises(Rejected, match=NO_ARRAY):
        accept("model", with_bytes(data), LIKE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 140), st.booleans())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_bytes_get_past_or_crash_the_screening(noise: bytes, at: int, keep: bool) -> None:
    """Random bytes, and a good array with random bytes written over it, are accepted or rejected, no more."""
    honest = npy(np.arange(3, dtype="f4"))
    data = honest[:at] + noise + honest[at + len(noise) :] if keep else noise
    try:
        found = accept("model", with_bytes(data), LIKE)
    except Rejected:
        return
    assert found["b"].shape == (3,)
    assert torch.isfinite(found["b"]).all()


@pytest.mark.parametrize("dtype", ["float32", "object"])
@pytest.mark.parametrize("stype", ["numpy.ndarray", "pickle", "torch", ""])
@pytest.mark.parametrize("kind", ["plain", "object array", "archive"])
def test_nothing_is_ever_unpickled(kind: str, stype: str, dtype: str, tmp_path: Path) -> None:
    data = pickles(tmp_path / "hatched")[kind]
    record = to_record(good())
    record["b"] = Array(dtype, (3,), stype, data)
    with pytest.raises(Rejected, match=NO_ARRAY if dtype == "float32" else "b has type object"):
        accept("model", record, LIKE)
    assert not list(tmp_path.iterdir())
    if kind == "plain":
        pickle.loads(data)
        assert list(tmp_path.iterdir()), "the canary is alive"


def test_an_array_of_another_serialisation_is_refused() -> None:
    record = to_record(good())
    record["b"] = Array("float32", (3,), "pickle", npy(np.zeros(3, "f4")))
    with pytest.raises(Rejected, match="cannot be decoded"):
        accept("model", record, LIKE)


def test_an_oversized_reply_is_refused_before_it_is_decoded() -> None:
    data = npy(np.zeros(1_000_000, "f4"))
    record = with_bytes(data, (1_000_000,))
    tracemalloc.start()
    with pytest.raises(Rejected, match="shape"):
        accept("model", record, LIKE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(data) / 10


def test_bytes_beyond_the_values_are_refused_before_they_are_decoded() -> None:
    data = npy(np.zeros(3, "f4")) + bytes(10_000)
    with pytest.raises(Rejected, match=f"'model': b has {len(data)} bytes; its values take 12"):
        accept("model", with_bytes(data), LIKE)


def test_a_reason_is_one_short_line_whatever_a_client_has_put_into_it() -> None:
    reason = str(Rejected("failed: \x1b[2J\nall is well\u2028" + "x" * 10_000))
    assert reason.startswith("failed:  all is well x")
    assert len(reason) < 310


@pytest.mark.parametrize(
    "metrics",
    [{}, {"num-examples": 1}, {"num-examples": 3, "risk": -0.5, "column": [1.0, 2.0]}, {"n": [0, 3]}, {"x": []}],
)
def test_good_metrics_pass(metrics: dict[str, float]) -> None:
    assert dict(check_metrics(MetricRecord(metrics), lists=True)) == metrics


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"risk": float("nan")}, "metric 'risk' is nan"),
        ({"risk": -float("inf")}, "metric 'risk' is -inf"),
        ({"losses": [1.0, float("inf")]}, "metric 'losses' is inf"),
        ({"num-examples": 0}, "metric 'num-examples' is 0, not a count"),
        ({"num-examples": -5}, "is -5, not a count"),
        ({"num-examples": 2.0}, "is 2.0, not a count"),
        ({"num-examples": [3]}, "metric 'num-examples' is a list"),
        ({"num-examples": 10**18}, "'num-examples' is 1000000000000000000, and most_examples=1000 is the limit"),
        ({"risk": 1e300}, r"metric 'risk' is 1e\+300"),  # finite, but not once it is weighted
    ],
)
def test_bad_metrics_are_named(metrics: dict[str, float], reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        check_metrics(MetricRecord(metrics), lists=True, most_examples=1000)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"losses": [1.0, 2.0]}, "metric 'losses' is a list"),
        ({"personal/accuracy": 1.0}, "metric 'personal/accuracy' is for evaluations alone"),
    ],
)
def test_lists_and_names_of_evaluations_are_for_evaluations(metrics: dict[str, float], reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        check_metrics(MetricRecord(metrics))
    assert check_metrics(MetricRecord(metrics), lists=True)


BOUNDS = ("most_items=3", "most_array_bytes=100", "most_metric_bytes=80", "most_setting_bytes=9")
SMALL = toy_config("fedavg", *BOUNDS)


@pytest.mark.parametrize(
    ("arrays", "metrics", "configs", "reason"),
    [
        ({}, {f"m{number}": 0 for number in range(4)}, {}, "it has 4 metrics, and most_items=3 is the limit"),
        ({}, {"m" * 101: 0}, {}, "metrics: 'm{100}' is no name of at most 100 letters"),
        ({}, {"\x1b[2J": 0}, {}, r"metrics: '\\x1b\[2J' is no name"),
        ({}, {"column": [0.0] * 11}, {}, "its metrics have 88 bytes, and most_metric_bytes=80 is the limit"),
        ({}, {}, {f"s{number}": 0 for number in range(4)}, "it has 4 settings, and most_items=3 is the limit"),
        ({}, {}, {"test": ["west", "south"], "x": 1.0}, "its settings have 17 bytes, and most_setting_bytes=9"),
        ({}, {}, {"test": b"0123456789"}, "its settings have 10 bytes"),
        ({}, {}, {"\n": 1}, r"settings: '\\n' is no name"),
        ({"w": torch.zeros(26)}, {}, {}, "its arrays have 104 bytes, and most_array_bytes=100 is the limit"),
    ],
)
def test_a_reply_has_bounds(
    arrays: Tensors, metrics: dict[str, Any], configs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Rejected, match=reason):
        check_sizes({"model": to_record(arrays)}, MetricRecord(metrics), ConfigRecord(configs), SMALL)


def test_a_reply_within_its_bounds_passes() -> None:
    metrics, configs = {"column": [0.0] * 8, "n": 1, "m": 1}, {"test": ["west", "south"]}
    check_sizes({"m": to_record({"w": torch.zeros(25)})}, MetricRecord(metrics), ConfigRecord(configs), SMALL)


def test_a_trained_reply_must_count_its_samples() -> None:
    assert check_metrics(MetricRecord({"risk": 1.0}))
    with pytest.raises(Rejected, match=r"metric 'num-examples' is missing"):
        check_metrics(MetricRecord({"risk": 1.0}), counted=True)


class Waits(TorchDispatchMode):
    """Counts how often a value is taken from the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_device_is_not_waited_for_once_a_tensor() -> None:
    like = {f"w{number}": torch.ones(3) for number in range(20)}
    with Waits() as waits:
        accept("model", to_record(like), like)
    assert waits.count <= 1
