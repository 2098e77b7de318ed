import io
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire import to_record
from strategies.screening import Rejected, accept, check_metrics

LIKE = {"w": torch.zeros(2, 3), "n": torch.tensor(0), "b": torch.zeros(3)}


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


def test_huge_finite_values_are_accepted() -> None:
    """Their float32 sum overflows; each of them is finite all the same."""
    tensors = good() | {"b": torch.full((3,), 3e38)}
    assert torch.equal(accept("model", to_record(tensors), LIKE)["b"], tensors["b"])


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
    with pytest.raises(Rejected, match="b is not what its header says"):
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
    with pytest.raises(Rejected, match="'model' cannot be decoded"):
        accept("model", with_bytes(data), LIKE)


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


@pytest.mark.parametrize(
    "metrics",
    [{}, {"num-examples": 1}, {"num-examples": 3, "risk": -0.5, "column": [1.0, 2.0]}, {"n": [0, 3]}, {"x": []}],
)
def test_good_metrics_pass(metrics: dict[str, float]) -> None:
    assert dict(check_metrics(MetricRecord(metrics))) == metrics


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"risk": float("nan")}, "metric 'risk' is nan"),
        ({"risk": -float("inf")}, "metric 'risk' is -inf"),
        ({"losses": [1.0, float("inf")]}, r"metric 'losses' is \[1.0, inf\]"),
        ({"num-examples": 0}, "metric 'num-examples' is 0, not a count"),
        ({"num-examples": -5}, "is -5, not a count"),
        ({"num-examples": 2.0}, "is 2.0, not a count"),
        ({"num-examples": [3]}, r"is \[3\], not a count"),
    ],
)
def test_bad_metrics_are_named(metrics: dict[str, float], reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        check_metrics(MetricRecord(metrics))


def test_missing_metrics_are_named() -> None:
    with pytest.raises(Rejected, match="metrics are missing"):
        check_metrics(None)


def test_a_trained_reply_must_count_its_samples() -> None:
    assert check_metrics(MetricRecord({"risk": 1.0}))
    with pytest.raises(Rejected, match=r"metric 'num-examples' is missing"):
        check_metrics(MetricRecord({"risk": 1.0}), counted=True)
