"""The Open Inference Protocol's JSON, to and from the messages that gRPC has: one check, one answer for both.

Values may follow the JSON as bytes (Triton's extension "binary tensor data"): `Inference-Header-Content-Length`
says where the JSON ends, `binary_data_size` how many bytes are a tensor's.
"""

import base64
import binascii
import json
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perennial.client.serving import inference_pb2 as pb
from perennial.client.serving.messages import NUMBERS, decoded, encoded, invalid, short
from perennial.common.utils.suggestions import sentence

LARGEST_JSON = 16 * 2**20
"""Bytes: as Python's objects, JSON takes up to twenty times as many."""
LENGTH = "Inference-Header-Content-Length"
Parameter = bool | int | float | str


class Tensor(BaseModel):
    """An input of a request."""

    model_config = ConfigDict(strict=True)

    name: str
    datatype: str
    shape: list[int] = Field(max_length=16)
    parameters: dict[str, Parameter] = Field({}, max_length=64)
    data: list[Any] | None = None


class Output(BaseModel):
    """An output that a request asks for."""

    model_config = ConfigDict(strict=True)

    name: str
    parameters: dict[str, Parameter] = Field({}, max_length=64)


class Request(BaseModel):
    """The JSON of a request."""

    model_config = ConfigDict(strict=True)

    id: str = ""
    parameters: dict[str, Parameter] = Field({}, max_length=64)
    inputs: list[Tensor] = Field(max_length=4096)
    outputs: list[Output] = Field([], max_length=64)

    def binary(self, output: str) -> bool:
        """Whether an output is wanted as bytes behind the JSON."""
        asked = {one.name: one.parameters.get("binary_data") for one in self.outputs}.get(output)
        return bool(self.parameters.get("binary_data_output", False) if asked is None else asked)


def parsed(body: bytes, header: str | None) -> tuple[Request, bytes]:
    """The JSON of a body, and the bytes behind it. Raises `Refused`."""
    length = len(body)
    if header is not None:
        if not (header.isascii() and header.isdigit() and len(header) <= 12 and int(header) <= length):
            invalid(f"the header {LENGTH} is {short(header)!r}, but the body has {len(body)} bytes")
        length = int(header)
    if length > LARGEST_JSON:
        invalid(f"the JSON has {length} bytes, and {LARGEST_JSON} are the most; send values as binary data")
    try:
        return Request.model_validate_json(body[:length]), body[length:]
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        text = first["msg"] if first["type"] == "json_invalid" else sentence(error)
        invalid(f"the body is no request of the protocol ({short(' '.join(text.split()), 300)})")


def message(request: Request, binary: bytes, model: str, version: str) -> pb.ModelInferRequest:
    """What gRPC's clients would have sent. Raises `Refused`."""
    found = pb.ModelInferRequest(model_name=model, model_version=version, id=request.id)
    for name, value in request.parameters.items():
        found.parameters[name].string_param = str(value)
    at = 0
    for tensor in request.inputs:
        given = found.inputs.add(name=tensor.name, datatype=tensor.datatype)
        try:
            given.shape.extend(tensor.shape)
        except ValueError:
            invalid(f"input {short(tensor.name)!r} has a shape of impossible numbers")
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            found.raw_input_contents.append(_bytes(tensor))
            continue
        if type(size) is not int or tensor.data is not None or not 0 <= size <= len(binary) - at:
            name, left = short(tensor.name), len(binary) - at
            invalid(
                f"input {name!r} has binary_data_size {short(str(size))}, but {left} bytes are left behind the "
                "JSON; and it takes no data beside them"
            )
        found.raw_input_contents.append(binary[at : at + size])
        at += size
    if at < len(binary):
        invalid(f"{len(binary) - at} bytes behind the JSON belong to no input")
    for output in request.outputs:
        wanted = found.outputs.add(name=output.name)
        for name in output.parameters:
            wanted.parameters[name].bool_param = True  # which it has is all that counts
    return found


def _bytes(tensor: Tensor) -> bytes:
    """A tensor's values as raw contents. Raises `Refused`."""
    values, name = tensor.data or [], short(tensor.name)
    if tensor.shape[1:] == [1] and all(isinstance(row, list) and len(row) == 1 for row in values):
        values = [row[0] for row in values]  # a column as rows of one cell
    if tensor.datatype == "BYTES":
        values = ["" if value is None else value for value in values]  # an empty cell
        if not all(isinstance(value, str) for value in values):
            invalid(f"input {name!r} has data that are no list of texts")
        if tensor.parameters.get("content_type") != "base64":
            return encoded([value.encode() for value in values])
        try:
            return encoded([base64.b64decode(value, validate=True) for value in values])
        except (binascii.Error, ValueError):
            invalid(f"input {name!r} has data that are no base64")
    if tensor.datatype not in NUMBERS:
        return b""  # no input takes it, whatever its data: `samples` says what the input takes
    values = [np.nan if value is None else value for value in values]  # an empty cell
    try:
        if not _numbers_alone(values):
            raise ValueError
        array = np.array(values, np.float64)
    except (ValueError, OverflowError):  # lists of different lengths, or a whole number that no float is near
        if tensor.datatype == "INT64":
            return b""  # the same
        invalid(f"input {name!r} has data that are no numbers, row by row")
    if tensor.datatype == "INT64":
        whole = np.isfinite(array) & (np.abs(array) < 2.0**53) & (array == np.floor(array))
        return encoded(array.ravel().astype(np.int64)) if whole.all() else b""
    with np.errstate(over="ignore"):  # what is too large for FP32 is not finite, and refused as such
        return encoded(array.ravel().astype(np.float32))


def _numbers_alone(values: list[Any]) -> bool:
    """Whether lists hold numbers and no text, of which an array would take the longest one's room for each."""
    left = [values]
    while left:
        for value in left.pop():
            if isinstance(value, list):
                left.append(value)
            elif type(value) not in (int, float):
                return False
    return True


def reply(request: Request, response: pb.ModelInferResponse) -> tuple[bytes, int | None]:
    """The body of an answer, and where its JSON ends if bytes follow."""
    outputs, behind = [], []
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        described: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype,
            "shape": list(output.shape),
        }
        if request.binary(output.name):
            described["parameters"] = {"binary_data_size": len(raw)}
            behind.append(raw)
        else:
            described["data"] = _values(output.datatype, raw)
        outputs.append(described)
    document = {"model_name": response.model_name, "model_version": response.model_version, "outputs": outputs}
    if response.id:
        document["id"] = response.id
    header = json.dumps(document).encode()
    return b"".join([header, *behind]), len(header) if behind else None


def _values(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        return [text.decode() for text in decoded(raw)]
    values: list[Any] = np.frombuffer(raw, {"FP32": "<f4", "INT64": "<i8"}[datatype]).tolist()
    return values


def metadata(found: pb.ModelMetadataResponse) -> dict[str, Any]:
    """A model's metadata as JSON."""
    inputs, outputs = (
        [{"name": one.name, "datatype": one.datatype, "shape": list(one.shape)} for one in tensors]
        for tensors in (found.inputs, found.outputs)
    )
    return {
        "name": found.name,
        "versions": list(found.versions),
        "platform": found.platform,
        "inputs": inputs,
        "outputs": outputs,
    }
