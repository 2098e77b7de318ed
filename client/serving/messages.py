"""What the protocol's messages hold: checked, as tensors, and back."""

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import islice
from math import prod
from typing import Any, NoReturn, TypeVar

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from perennial.client.serving import inference_pb2 as pb
from perennial.common.data.columns import AnyColumn, CategoryColumn
from perennial.common.data.environments import unit_range
from perennial.common.data.raw_data import FORMATS, MOST_PIXELS, opened, resized
from perennial.common.data.scenario import Scenario
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.tasks import PredictionTask
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import PAD, padded, vocabulary_of

INPUT = "input"
Features = np.ndarray[Any, np.dtype[np.float32]]
NUMBERS: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "INT64": np.dtype("<i8")}
"""How raw contents of a datatype are read."""
CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents", "BYTES": "bytes_contents"}
"""The field of `InferTensorContents` that holds values of a datatype."""
MOST_FIELDS = 64
"""Of a request, and of each message in it; a client of the protocol sends about ten."""
LONGEST_TEXT = 256
"""Bytes of a cell with a name."""
PIECE = 2**16
"""Values that become an array at once, without a moment for other callers."""
LONGEST_NAME, MOST_SHOWN = 64, 8
"""What a sentence quotes of a request: letters of a name, items of a list."""
MOST_TEXT = 2**20
"""Bytes of the texts in a PNG."""
T = TypeVar("T")
Numbers = np.ndarray[Any, Any]
Values = Numbers | list[bytes]


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """Why a request has no other answer: gRPC's code and one sentence; HTTP's status, if it is a special one."""

    def __init__(self, code: grpc.StatusCode, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.code, self.status = code, status


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


def too_many_fields(data: bytes, most: int = MOST_FIELDS, texts: int = 0) -> bool:
    """Whether a `ModelInferRequest` on the wire has a message of more fields than a client of the protocol sends.

    Of `texts` there may be so many in all its inputs together beside these. Parsing takes up to fifty times the
    bytes of a message that is all empty parts; they are counted before.
    """
    levels: list[tuple[memoryview, Mapping[int, Any]]] = [(memoryview(data), REPEATED)]
    for message, inside in levels:
        count = 0
        for number, content in fields(message):
            if inside is IN_CONTENTS and number == 8 and texts:  # of bytes_contents
                texts -= 1
                continue
            if count == most:
                return True
            count += 1
            if number in inside and content is not None:
                levels.append((content, inside[number]))
    return False


IN_CONTENTS: Mapping[int, Any] = {}
REPEATED: Mapping[int, Any] = {5: {5: IN_CONTENTS}, 6: {}}
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


def samples(request: pb.ModelInferRequest, scenario: Scenario, max_batch: int) -> Tensor:
    """The samples (n, *input_shape) of a request. Raises `Refused` with a sentence for what is wrong with them.

    They are one tensor of numbers; or of a table the cells of each column, among them files of pictures; or such
    files, where a sample is (channels, height, width) with one channel or three.
    """
    input_shape, columns, image = scenario.input_shape, scenario.column_names, image_column(scenario)
    names = [tensor.name for tensor in request.inputs]
    if columns and sorted(names) == sorted([*columns, *image]):
        parts = [_cells(request, names.index(name), scenario.cells.get(name), max_batch) for name in columns]
        for name, shape in image.items():
            pictures = _pictures(request, names.index(name), shape, max_batch)
            parts.insert(0, pictures.flatten(1).numpy())
        if len(lengths := {len(part) for part in parts}) > 1:
            invalid(f"the columns have {min(lengths)} to {max(lengths)} rows, but all must have as many")
        return torch.from_numpy(np.concatenate(parts, axis=1))
    if names != [INPUT]:
        columns = (*columns, *image)
        if not set(columns).isdisjoint(names):
            invalid(_misfit(names, columns))
        or_columns = f", or one for each column: {few(columns)}" if columns else ""
        given = few([short(name) for name in names])
        invalid(f"the inputs are {given}, but the model has one, {INPUT!r}{or_columns}")
    if request.inputs[0].datatype == "BYTES" and takes_pictures(input_shape):
        return _pictures(request, 0, input_shape, max_batch)
    if isinstance(scenario, OwnData) and scenario.text_column and request.inputs[0].datatype == "BYTES":
        texts = _texts(request, 0, max_batch, longest=MOST_TEXT)
        return scenario.ids([text.decode(errors="replace") for text in texts])
    if not (most := vocabulary_of(input_shape)):
        return torch.from_numpy(_numbers(request, 0, tuple(input_shape), max_batch))
    ids = _numbers(request, 0, tuple(input_shape), max_batch, datatype="INT64")
    if ids.min() < (PAD if padded(input_shape) else 0) or ids.max() >= most:
        invalid(f"input {INPUT!r} has ids of tokens that are not from 0 to {most - 1}")
    return torch.from_numpy(ids)


def _misfit(names: Sequence[str], columns: Sequence[str]) -> str:
    """What is wrong with inputs of which some are columns."""
    given, known = set(names), set(columns)
    lacking = next((f"column {name!r} is missing" for name in columns if name not in given), "")
    beyond = next((f"the model has no column {short(name)!r}" for name in names if name not in known), "")
    most = Counter(names).most_common(1)[0][0]
    return ", and ".join(filter(None, (lacking, beyond))) or f"column {most!r} is there more than once"


def datatype_of(scenario: Scenario) -> str:
    """Of the input of samples."""
    return "INT64" if vocabulary_of(scenario.input_shape) else "FP32"


def image_column(scenario: Scenario) -> dict[str, tuple[int, ...]]:
    """Of a table with a column of pictures its name, and the shape that each becomes."""
    found = isinstance(scenario, OwnData) and scenario.image_column
    return {scenario.image_column: scenario.image_shape} if found else {}  # type: ignore[attr-defined]


def has_pictures(scenario: Scenario) -> bool:
    """Whether a request for it may have files of pictures."""
    return takes_pictures(scenario.input_shape) or bool(image_column(scenario))


def takes_pictures(input_shape: tuple[int, ...]) -> bool:
    """Whether a sample can be the file of a picture, in grey or in colour."""
    return len(input_shape) == 3 and input_shape[0] in (1, 3) and not vocabulary_of(input_shape)


def _cells(request: pb.ModelInferRequest, place: int, column: AnyColumn | None, max_batch: int) -> Features:
    """The features (n, width) of a column's cells: texts of a category, numbers of any other, NaN where empty."""
    if isinstance(column, CategoryColumn):
        if (given := request.inputs[place]).datatype != "BYTES":
            name, datatype = short(given.name), short(given.datatype)
            invalid(f"input {name!r} has datatype {datatype!r}, but a column of names takes 'BYTES'")
        texts = _texts(request, place, max_batch, longest=LONGEST_TEXT)
        # PyArrow takes its time to import, and only tables with names need it.
        import pyarrow as pa

        from perennial.common.data.tables import plain_texts

        decoded_texts = pa.array([text.decode(errors="replace") for text in texts], pa.string())
        return column.features(plain_texts(decoded_texts))  # as in training
    values = _numbers(request, place, (), max_batch, may_be_empty=column is not None and column.fill is not None)
    return values[:, None] if column is None else column.features(values.astype(np.float64))


def _texts(
    request: pb.ModelInferRequest, place: int, max_batch: int, what: str = "texts", longest: int | None = None
) -> list[bytes]:
    """The texts, or files, (n,) of an input of BYTES."""
    given = request.inputs[place]
    (count,) = _shape(given, (), max_batch)
    values = _contents(request, place, "BYTES")
    texts = decoded(values) if isinstance(values, bytes) else list(values)
    name = short(given.name)
    if len(texts) != count:
        invalid(f"input {name!r} has {len(texts)} {what}, but shape {list(given.shape)} takes {count}")
    if longest and any(len(text) > longest for text in texts):
        invalid(f"input {name!r} has a text of more than {longest} bytes")
    return texts


def _numbers(
    request: pb.ModelInferRequest,
    place: int,
    each: tuple[int, ...],
    max_batch: int,
    may_be_empty: bool = False,
    datatype: str = "FP32",
) -> Numbers:
    """The values (n, *each) of an input; those of a column, whose `each` is (), may also be (n, 1)."""
    given = request.inputs[place]
    name = short(given.name)
    if given.datatype != datatype:
        or_files = " or, for files of pictures, 'BYTES'" if takes_pictures(each) else ""
        invalid(
            f"input {name!r} has datatype {short(given.datatype)!r}, but the model takes {datatype!r}{or_files}"
        )
    shape = _shape(given, each, max_batch)
    contents, kind = _contents(request, place, datatype), NUMBERS[datatype]
    if isinstance(contents, bytes):
        if datatype == "INT64" and not contents:
            invalid(f"input {name!r} has data that are no whole numbers, row by row")
        if len(contents) != (size := kind.itemsize * prod(shape)):
            takes = f"shape {list(shape)} of {datatype} takes {size}"
            invalid(f"input {name!r} has {len(contents)} bytes, but {takes}")
        values: Numbers = np.frombuffer(contents, kind).astype(kind.newbyteorder("="))
    else:
        if len(contents) != prod(shape):
            invalid(f"input {name!r} has {len(contents)} values, but shape {list(shape)} takes {prod(shape)}")
        values = np.empty(len(contents), kind.newbyteorder("="))
        for start in range(0, len(values), PIECE):
            values[start : start + PIECE] = contents[start : start + PIECE]
    if not (np.isfinite(values) | (may_be_empty & np.isnan(values))).all():
        invalid(f"input {name!r} has values that are not finite")
    return values.reshape(shape)


def _pictures(request: pb.ModelInferRequest, place: int, input_shape: tuple[int, ...], max_batch: int) -> Tensor:
    """An input's files of pictures (n,), decoded one after another as those of a site's own data."""
    name, files = request.inputs[place].name, _texts(request, place, max_batch, "pictures")
    from PIL import PngImagePlugin

    PngImagePlugin.MAX_TEXT_MEMORY = MOST_TEXT  # PIL unpacks a PNG's packed texts as it opens it
    channels, height, width = input_shape
    pixels, together = np.empty((len(files), *input_shape), np.uint8), 0
    for number, file in enumerate(files):
        try:
            with opened(BytesIO(file), FORMATS) as found:
                together += found.width * found.height
                if together <= MOST_PIXELS:  # a small file may take a second to decode
                    pixels[number] = resized(found, (channels, height, width))
        except ValueError as error:
            why = short(" ".join(str(error).split()), 200)
            invalid(f"picture {number} of input {name!r} cannot be read ({why})")
        if together > MOST_PIXELS:
            invalid(
                f"input {name!r} has pictures of more than {MOST_PIXELS} pixels together; "
                "send fewer or smaller ones"
            )
    return unit_range(torch.from_numpy(pixels))


def _shape(given: pb.ModelInferRequest.InferInputTensor, each: tuple[int, ...], max_batch: int) -> tuple[int, ...]:
    shape, expected = tuple(given.shape), f"[{', '.join(['-1', *map(str, each)])}]"
    name = short(given.name)
    if not each and shape[1:] == (1,):
        shape = shape[:1]
    if len(shape) != 1 + len(each):
        hint = "; a single sample has the shape [1, ...]" if each and shape == each else ""
        invalid(f"input {name!r} has shape {few(shape)}, but the model takes {expected}{hint}")
    if shape[1:] != each:
        invalid(f"input {name!r} has shape {few(shape)}, but the model takes {expected}")
    if not 1 <= shape[0] <= max_batch:
        invalid(f"input {name!r} has a batch of {shape[0]}, but 1 to {max_batch} samples are possible")
    return shape


def _contents(request: pb.ModelInferRequest, place: int, datatype: str) -> bytes | Sequence[Any]:
    """An input's raw contents, or its typed values. Raises `Refused` where they are both, or of another type."""
    given, raw = request.inputs[place], request.raw_input_contents
    name, typed_fields = short(given.name), [field.name for field, _ in given.contents.ListFields()]
    if raw and (typed_fields or len(raw) != len(request.inputs)):
        invalid(f"input {name!r} has its values more than once; give one raw_input_contents, or contents")
    field = CONTENTS[datatype]
    if typed_fields not in ([], [field]):
        invalid(f"input {name!r} has its values in {', '.join(typed_fields)}, but {datatype} is in {field}")
    values: bytes | Sequence[Any] = raw[place] if raw else getattr(given.contents, field)
    return values


def outputs_of(task: PredictionTask) -> dict[str, tuple[str, list[int]]]:
    """Datatype and shape of each output, by name."""
    return {name: (own.datatype, [-1, *own.shape]) for name, own in task.answer_tensors.items()}


def answers(outputs: Tensor, task: PredictionTask, asked: Mapping[str, str] | None = None) -> dict[str, Values]:
    """Each tensor of the answer, from a model's outputs (n, `task.outputs`). Raises `Refused`."""
    try:
        numbers: dict[str, Numbers] = {name: own.numpy() for name, own in task.answer(outputs, asked).items()}
    except UserError as error:
        invalid(str(error))
    texts = {name: own for name, own in task.answer_tensors.items() if own.texts}
    named = {name: [own.texts[place].encode() for place in numbers[own.texts_by]] for name, own in texts.items()}
    return {**numbers, **named}


def typed(datatype: str, values: Values) -> pb.InferTensorContents:
    """An output as typed contents, row-major."""
    contents = pb.InferTensorContents()
    getattr(contents, CONTENTS[datatype]).extend(values if isinstance(values, list) else values.ravel().tolist())
    return contents


def decoded(raw: bytes) -> list[bytes]:
    """The texts that `encoded` has put into raw contents. Raises `Refused`."""
    texts, at = list[bytes](), 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at) if at + 4 <= len(raw) else (len(raw),)
        if at + 4 + size > len(raw):
            invalid("the bytes of a tensor of BYTES end within one; each follows its length in four bytes")
        texts.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return texts


def encoded(values: Values) -> bytes:
    """An output as raw contents: little-endian and row-major; each of BYTES after its length in four bytes."""
    if isinstance(values, list):
        return b"".join(struct.pack("<I", len(text)) + text for text in values)
    return values.astype(values.dtype.newbyteorder("<")).tobytes()
