"""What the protocol's messages hold: checked, as tensors, and back."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any, NoReturn, TypeVar

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from client.serving.inference_pb2 import (
    InferTensorContents,
    ModelInferRequest,
)
from common.data.scenario import Scenario

INPUT = "input"
PROBABILITIES, CLASS, LABEL = "probabilities", "class", "label"
CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents", "BYTES": "bytes_contents"}
"""The field of `InferTensorContents` that holds values of a datatype."""
MOST_FIELDS = 64
"""Of a request, and of each message in it; a client of the protocol sends about ten."""
PIECE = 2**16
"""Values that become an array at once, without a moment for other callers."""
LONGEST_NAME, MOST_SHOWN = 64, 8
"""What a sentence quotes of a request: letters of a name, items of a list."""
T = TypeVar("T")
Values = np.ndarray[Any, Any] | list[bytes]


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """Why a request has no other answer: gRPC's code and one sentence."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def invalid(sentence: str) -> NoReturn:
    """Refuse a request that is wrong in itself."""
    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, sentence)


def short(text: str, most: int = LONGEST_NAME) -> str:
    """A text of the caller's as a sentence may quote it."""
    return text if len(text) <= most else text[: most - 1] + "…"


def few(items: Sequence[object]) -> str:
    """A list of the caller's as a sentence may quote it."""
    more = ["…"] * (len(items) > MOST_SHOWN)
    return f"[{', '.join([repr(item) for item in islice(items, MOST_SHOWN)] + more)}]"


def too_many_fields(data: bytes) -> bool:
    """Whether a `ModelInferRequest` on the wire is not what a client of the protocol makes.

    Parsing takes up to fifty times the bytes of a message that is all empty parts; they are counted before.
    """
    levels: list[tuple[memoryview, Mapping[int, Any]]] = [(memoryview(data), REPEATED)]
    for message, inside in levels:
        for count, (number, content) in enumerate(fields(message)):
            if count == MOST_FIELDS:
                return True
            if number in inside and content is not None:
                levels.append((content, inside[number]))
    return False


REPEATED: Mapping[int, Any] = {5: {5: {}}, 6: {}}
"""Numbers of the fields with lists in them: `inputs`, and in these `contents`; `outputs`."""


def fields(message: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Number and content of each field of a protobuf message as far as it is one; None: a number."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80 or shift > 63:
                return value

    try:
        while at < len(message):
            number, kind = divmod(varint(), 8)
            size = varint() if kind == 2 else {1: 8, 5: 4}.get(kind, 0)
            if kind == 0:
                varint()
            yield number, message[at : at + size] if kind == 2 else None
            at += size
    except IndexError:  # cut off; whoever parses it says so
        return


def parsed(data: bytes, parse: Callable[[bytes], T]) -> T:
    """A request's message. Raises `Refused` where the bytes are none."""
    try:
        return parse(data)
    except DecodeError:
        invalid("the bytes of the request are no message of the protocol")


def samples(request: ModelInferRequest, input_shape: tuple[int, ...], max_batch: int) -> Tensor:
    """The samples (n, *input_shape) of a request. Raises `Refused` with a sentence for what is wrong with them."""
    names = [tensor.name for tensor in request.inputs]
    if names != [INPUT]:
        invalid(f"the inputs are {few([short(name) for name in names])}, but the model has one, {INPUT!r}")
    given = request.inputs[0]
    shape, expected = tuple(given.shape), f"[-1, {', '.join(map(str, input_shape))}]"
    if given.datatype != "FP32":
        invalid(f"input {INPUT!r} has datatype {short(given.datatype)!r}, but the model takes 'FP32'")
    if len(shape) != 1 + len(input_shape):
        hint = "; a single sample has the shape [1, ...]" if shape == input_shape else ""
        invalid(f"input {INPUT!r} has shape {few(shape)}, but the model takes {expected}{hint}")
    if shape[1:] != input_shape:
        invalid(f"input {INPUT!r} has shape {few(shape)}, but the model takes {expected}")
    if not 1 <= shape[0] <= max_batch:
        invalid(f"input {INPUT!r} has a batch of {shape[0]}, but 1 to {max_batch} samples are possible")
    typed_fields = [field.name for field, _ in given.contents.ListFields()]
    if request.raw_input_contents:
        if typed_fields or len(request.raw_input_contents) > 1:
            invalid(f"input {INPUT!r} has its values more than once; give one raw_input_contents, or contents")
        data = request.raw_input_contents[0]
        if len(data) != 4 * prod(shape):
            invalid(
                f"input {INPUT!r} has {len(data)} bytes, but shape {list(shape)} of FP32 takes {4 * prod(shape)}"
            )
        values = np.frombuffer(data, "<f4").astype(np.float32)
    else:
        if typed_fields not in ([], [CONTENTS["FP32"]]):
            invalid(f"input {INPUT!r} has its values in {', '.join(typed_fields)}, but FP32 is in fp32_contents")
        given_values = given.contents.fp32_contents
        if len(given_values) != prod(shape):
            invalid(f"input {INPUT!r} has {len(given_values)} values, but shape {list(shape)} takes {prod(shape)}")
        values = np.empty(len(given_values), np.float32)
        for start in range(0, len(values), PIECE):
            values[start : start + PIECE] = given_values[start : start + PIECE]
    if not np.isfinite(values).all():
        invalid(f"input {INPUT!r} has values that are not finite")
    return torch.from_numpy(values).reshape(shape)


def outputs_of(scenario: Scenario) -> dict[str, tuple[str, list[int]]]:
    """Datatype and shape of each output, by name."""
    described = {PROBABILITIES: ("FP32", [-1, scenario.classes]), CLASS: ("INT64", [-1])}
    return {**described, LABEL: ("BYTES", [-1])} if scenario.class_names else described


def answers(logits: Tensor, scenario: Scenario) -> dict[str, Values]:
    """Each output's values; the class is the one that an evaluation counts."""
    classes = logits.argmax(dim=1)
    labels = [scenario.class_names[number].encode() for number in classes] if scenario.class_names else []
    return {PROBABILITIES: logits.softmax(dim=1).numpy(), CLASS: classes.numpy(), LABEL: labels}


def typed(datatype: str, values: Values) -> InferTensorContents:
    """An output as typed contents, row-major."""
    contents = InferTensorContents()
    getattr(contents, CONTENTS[datatype]).extend(values if isinstance(values, list) else values.ravel().tolist())
    return contents


def encoded(values: Values) -> bytes:
    """An output as raw contents: little-endian and row-major; each of BYTES after its length in four bytes."""
    if isinstance(values, list):
        return b"".join(struct.pack("<I", len(text)) + text for text in values)
    return values.astype(values.dtype.newbyteorder("<")).tobytes()
