"""Names of what travels, and the step from tensors to Flower's records and back.

Tensors in a record are encoded only when the record leaves the process. On the local runtime they never do,
so a message costs no copy; over gRPC the bytes are numpy's own format, read with pickling refused.
"""

import re
from collections.abc import Mapping
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from perennial.common.flower.arrays import TensorArray, decoded, record_of
from perennial.common.utils.tensors import Tensors

R = TypeVar("R", ArrayRecord, MetricRecord, ConfigRecord)
Scalar = int | float | str | bool | list[int] | list[float] | list[str]

# Record names. A method's own records are named in its strategy and client alike.
MODEL = "model"
PERSONAL = "personal"
HEAD = "head"
GRADIENT = "gradient"
CONFIG = "config"
METRICS = "metrics"

# Keys of the configuration record that every request carries.
TASK = "task"
RUN = "run"
ROUND = "round"
KEPT = "kept"
RESUMED = "resumed"

# Keys of the settings in the answer to a `query`: which client this is, why it cannot take part, and on what
# protection its policy insists.
CLIENT = "client"
REFUSED = "refused"
INSISTS = "insists"
FROZEN = "frozen"
"""The digest of what no training changes of the model, where there is such a part."""

RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A run's, which names a folder at the sites."""
LONGEST_NAME = 100
"""Letters of a record's, a metric's or a setting's name."""
# Key of a reply's metrics: Flower's own name for the sample count.
NUM_EXAMPLES = "num-examples"


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """An array record over the tensors themselves; the caller must not change them afterwards."""
    return record_of({name: TensorArray(tensor) for name, tensor in tensors.items()})


def from_record(record: ArrayRecord) -> Tensors:
    """The tensors of a record, to be read and not changed. Raises nearly anything for bytes that are no array."""
    return {
        name: array.tensor if isinstance(array, TensorArray) else decoded(array) for name, array in record.items()
    }


def records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """The records of one kind in a message, by name.

    Flower's `content.array_records` and its like hold the same, but are made and type-checked anew at every use,
    which takes ten times as long.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def record_bytes(record: MetricRecord | ConfigRecord) -> int:
    """About what numbers, texts and lists of them take on the wire: 8 for a number and 1 for a letter."""
    return sum(
        len(item) if isinstance(item, (str, bytes)) else 8
        for value in record.values()
        for item in (value if isinstance(value, list) else [value])
    )


def numbers(metrics: Mapping[str, int | float | list[int] | list[float]]) -> dict[str, float]:
    """Those of a reply's metrics that are no lists."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, list)}


def payload_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of the values alone: 4 bytes for a float32, without names and framing."""
    return sum(tensor.nbytes for tensor in tensors.values())
