"""Replies with one thing wrong in them. Without PyTorch, which `misbehaving_site.py` would import each time."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from perennial.common.flower.names import ErrorCode

BAD_TENSORS = {
    "nan": "not finite",
    "huge": "the value 1e+30, and largest=1e+09 is the limit",
    "shape": "shape",
    "key": "lacks",
    "type": "type",
    "bytes": "decoded",
    "pickle": "decoded",
    "size": "its values take",
}
"""What can be wrong with the tensors of a reply, and words of the reason."""
OTHERWISE_BAD = {
    "metrics": "metric",
    "samples": "when the client enrolled",
    "record": "unexpected record 'more'",
    "raise": "out of memory",
}
"""What else can be wrong with a reply."""


def with_fault(fault: str, request: Message, reply: Message, canary: Path = Path("/nowhere")) -> Message:
    """A client's reply with one thing wrong in it. `pickle` makes the file `canary` if anything unpickles it."""
    if fault == "raise":
        return Message(
            Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "<class 'RuntimeError'>:<'out of memory'>"),
            reply_to=request,
        )
    content = RecordDict(dict(reply.content))
    if fault.startswith("claim "):
        content["config"] = ConfigRecord({"client": fault.removeprefix("claim ")})
    elif fault in ("metrics", "samples"):
        count = float("nan") if fault == "metrics" else 10**6
        content["metrics"] = MetricRecord({**content.metric_records["metrics"], "num-examples": count})
    elif fault == "record":
        content["more"] = ArrayRecord()
    else:
        for name, record in content.array_records.items():
            arrays = dict(record)
            key = next(iter(arrays))
            bad = bad_array(fault, arrays.pop(key), canary)
            content[name] = ArrayRecord({key: bad, **arrays} if bad else arrays)
    return Message(content, reply_to=request)


def bad_array(fault: str, good: Array, canary: Path) -> Array | None:
    """An array with one thing wrong in it; None where it is to be missing."""
    match fault:
        case "nan" | "huge":
            return Array(np.full(good.shape, {"nan": np.nan, "huge": 1e30}[fault], good.dtype))
        case "shape":
            return Array(np.zeros((*good.shape, 2), good.dtype))
        case "type":
            return Array(np.zeros(good.shape, np.float16))
        case "tenfold":
            return Array(10 * good.numpy())
        case "key":
            return None
    data = {
        "bytes": b"\x80\x04no array",
        "pickle": pickles(canary)["object array"],
        "size": good.data * 10 + bytes(2000),
    }
    return Array(good.dtype, good.shape, good.stype, data[fault])


class Canary:
    """Its pickle makes a file when somebody reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickles(path: Path) -> dict[str, bytes]:
    """Bytes that make a file at `path` if anything unpickles them."""
    objects = np.array([Canary(path)] * 3, dtype=object)
    plain, archive = io.BytesIO(), io.BytesIO()
    np.save(plain, objects, allow_pickle=True)
    np.savez(archive, b=objects)
    return {
        "plain": pickle.dumps(Canary(path)),
        "object array": plain.getvalue(),
        "archive": archive.getvalue(),
    }
