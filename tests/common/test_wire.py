import pickle
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from perennial.common.flower.arrays import TensorArray
from perennial.common.stacks import Requests
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import CONFIG, MODEL, from_record, payload_bytes, to_record

TENSORS = {
    "float32": torch.tensor([[0.1, -3e38], [1e-45, float("inf")]]),
    "float64": torch.linspace(0, 1, 7, dtype=torch.float64),
    "float16": torch.tensor([65504.0, 6e-8]).half(),
    "int64": torch.tensor([2**62, -1]),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(0.1),
    "counter": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "strided": torch.arange(10)[::3],
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


def over_the_wire(content: RecordDict) -> RecordDict:
    """What the other side gets: the objects that `GrpcGrid` and a SuperNode push, as bytes, and inflated again."""
    message = Message(content, 7, "train")
    with no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        contents = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
    there = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(there, Message)
    return there.content


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def test_tensors_survive_flowers_wire_path_and_arrive_as_plain_arrays() -> None:
    record = over_the_wire(RecordDict({MODEL: to_record(TENSORS)})).array_records[MODEL]
    assert {type(array) for array in record.values()} == {Array}
    assert_equal(from_record(record), TENSORS)
    # Any other Flower app reads them, too.
    assert np.array_equal(record["transposed"].numpy(), TENSORS["transposed"].numpy())


def test_several_chunks_and_a_record_shared_by_two_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 64)
    record = to_record({"w": torch.zeros(100), "b": torch.arange(100.0)})  # zeros: chunks that are equal
    for _ in range(2):
        there = over_the_wire(RecordDict({MODEL: record})).array_records[MODEL]
        assert_equal(from_record(there), from_record(record))


@settings(max_examples=25, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_any_array_survives_bit_by_bit(values: np.ndarray) -> None:
    record = over_the_wire(RecordDict({MODEL: to_record({"w": torch.from_numpy(values)})})).array_records[MODEL]
    assert from_record(record)["w"].numpy().tobytes() == values.tobytes()
    assert tuple(record["w"].shape) == values.shape


def test_bfloat16_travels_as_float32_without_loss() -> None:
    tensor = torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16()
    record = over_the_wire(RecordDict({MODEL: to_record({"w": tensor})})).array_records[MODEL]
    assert record["w"].dtype == "float32"
    assert torch.equal(from_record(record)["w"].bfloat16(), tensor)


def test_within_a_process_the_tensor_itself_is_handed_over_and_no_bytes_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr(Array, "from_numpy_ndarray", refuse)
    monkeypatch.setattr(Array, "from_torch_tensor", refuse)
    tensor = torch.ones(3, requires_grad=True)
    message = Message(RecordDict({MODEL: to_record({"w": tensor})}), 1, "train")
    reply = Message(RecordDict(dict(message.content)), reply_to=message)
    back = from_record(reply.content.array_records[MODEL])["w"]
    assert back.data_ptr() == tensor.data_ptr()
    assert not back.requires_grad
    with pytest.raises(AssertionError, match="encoded"):
        _ = reply.content.array_records[MODEL]["w"].data


def test_the_header_agrees_with_the_bytes() -> None:
    for name, tensor in TENSORS.items():
        ours, flowers = TensorArray(tensor), Array(tensor.detach())
        assert (ours.dtype, ours.shape, ours.stype, ours.data) == (
            flowers.dtype, flowers.shape, flowers.stype, flowers.data,
        ), name  # fmt: skip
        assert ours.object_id == flowers.object_id, name


def test_pickle_carries_it_between_rays_processes() -> None:
    back = pickle.loads(pickle.dumps(RecordDict({MODEL: to_record(TENSORS)})))
    assert_equal(from_record(over_the_wire(back).array_records[MODEL]), TENSORS)


def test_pickled_bytes_and_object_arrays_are_refused() -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return pytest.fail, ("code from the network was run",)

    objects = BytesIO()
    np.save(objects, np.array([Trap()], dtype=object), allow_pickle=True)
    for data in (pickle.dumps(Trap()), objects.getvalue()):
        record = ArrayRecord()
        record["w"] = Array("float32", (1,), "numpy.ndarray", data)
        with pytest.raises(ValueError, match=r"magic string|is not what its header says"):
            from_record(record)


def test_flowers_array_is_still_made_as_tensor_array_assumes() -> None:
    """Fails when the pin moves to a Flower whose `Array` has other fields: then `TensorArray` has to follow."""
    array = Array(np.zeros(2, "f4"))
    public = {name for name in vars(array) if not name.startswith("_")}
    assert public == {"dtype", "shape", "stype", "data"}
    assert list(Array.__dataclass_fields__) == ["dtype", "shape", "stype", "data"]
    # Everything that `Array` does with its bytes goes through `data` or `deflate`, which `TensorArray` overrides.
    own = {name for name in vars(Array) if not name.startswith("_")}
    assert own == {
        "from_numpy_ndarray", "from_torch_tensor", "numpy", "children", "slice_array", "deflate", "inflate",
        "object_id", "is_dirty",
    }  # fmt: skip


def test_payload_bytes_counts_values_alone() -> None:
    tensors = {"w": torch.zeros(3, 5), "n": torch.tensor(1), "half": torch.zeros(2).half()}
    assert payload_bytes(tensors) == 60 + 8 + 4


def test_what_is_added_to_one_request_is_in_no_other() -> None:
    arrays = {"model": to_record({"w": torch.zeros(1)})}
    requests = Requests("train", 1, ConfigRecord({"run": "r"}), [(1, arrays), (2, arrays)])
    first, second = requests
    first.content["more"] = ConfigRecord({"name": "x"})
    assert set(second.content) == set(requests[0].content) == {CONFIG, "model"}
