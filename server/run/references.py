"""The file of references that a run of the selection `split` names."""

from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError

from perennial.common.config import RunConfig
from perennial.common.models.network import network
from perennial.common.selection import References, record
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import records_in


def load_references(config: RunConfig) -> References | None:
    """The references that a run names; None where it names none.

    Raises `UserError` for a file that is not there, is damaged, or is of another scenario or model.
    """
    if not config.references:
        return None
    path, scenario = Path(config.references), config.scenario
    try:
        data = path.read_bytes()
        records, digest = records_in(data), sha256(data).hexdigest()[:12]
    except (OSError, SafetensorError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(
            f"references: {path} cannot be read ({why:.200}); make it with perennial run --method references"
        ) from None
    net = network(config.model, scenario.input_shape, config.predicts.outputs, torch.device("cpu"))
    shapes = {name: tensor.shape for name, tensor in net.initial(config.seed).items()}
    names = [record(number) for number in range(len(scenario.train_environments))]
    found = [{key: tensor.shape for key, tensor in tensors.items()} for tensors in records.values()]
    if sorted(records) != sorted(names) or any(shapes != own for own in found):
        raise UserError(
            f"references: {path} has other models than one of this run's for each of the {len(names)} training "
            f"environments of {scenario.name}; make it with perennial run --method references"
        )
    if not all(bool(tensor.isfinite().all()) for tensors in records.values() for tensor in tensors.values()):
        raise UserError(f"references: {path} has values that are not finite; make it anew")
    return References({name: records[name] for name in names}, digest)
