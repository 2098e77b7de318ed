"""Secure aggregation: what travels, and what server and clients compute alike (Bonawitz et al. 2017).

Vectors are of whole numbers modulo 2^64, so sums are exact and a mask hides a number completely. The order of two
clients' names gives the mask that they have in common its signs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from perennial.common.methods.base import Sum
from perennial.common.utils.tensors import Tensors

Words = npt.NDArray[np.uint64]

ADVERTISE, SHARE, UNMASK = "train.keys", "train.shares", "train.unmask"
ACTIONS = (ADVERTISE, SHARE, UNMASK)
"""Message types beside `train`, which is the third of four stages."""
THRESHOLD, COLLUDERS, SURVIVORS, DROPPED = "threshold", "colluders", "survivors", "dropped"
"""Settings of requests."""

KEYS = "keys"
"""Record: a client's two public keys, as one tensor of bytes by client id."""
SHARES = "shares"
"""Record: shares of secrets, sealed (`train.shares`, `train`) or not (`train.unmask`), by client id."""
MASKED = "masked"
"""Record: the masked vector as bytes."""
TERMS = "terms"
"""Record of a `train` request: the client's `weight`, and the `range` of its update."""

KEY_BYTES = 32
SHARE_BYTES = 52
"""Of 32 secret bytes, as Flower's `create_shares` makes them."""
NONCE_BYTES = 12
SEALED_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + 16
"""Nonce, two shares, tag."""
STEPS = 2**23
"""Steps of the fixed-point numbers on either side of 0. With 10^12 samples in all, sums stay below 2^63."""
VOTES = 8.0
"""The range of bounded records, in the place of `privacy.range`: in its steps ±1 is exact."""


def public(secret: bytes) -> bytes:
    """The public key of a secret one (X25519)."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def shared_key(secret: bytes, other: bytes, purpose: str) -> bytes:
    """The key that the owner of `secret` and that of the public key `other` have in common for one purpose."""
    shared = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose.encode()).derive(shared)


def mask(key: bytes, size: int) -> Words:
    """`size` words that nobody without the key can tell from random ones (ChaCha20). A key is for one mask."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), dtype="<u8").astype(np.uint64)


def pair_mask(secret: bytes, other: bytes, client: str, rival: str, size: int) -> Words:
    """What `client` adds for `rival`, and `rival` takes away for `client`: their sum is 0.

    `secret` is the one's masking key and `other` the other's public one, either way round.
    """
    common = mask(shared_key(secret, other, "mask"), size)
    return common if client < rival else np.negative(common)


def quantised(model: Mapping[str, Tensor], reference: Tensors, limit: float) -> Words:
    """The update `model − reference` in whole steps of `limit / STEPS`, as one vector.

    Raises `ValueError` where it is not within ± `limit`, or no number.
    """
    pairs = [(model[name].cpu().double(), before.cpu()) for name, before in reference.items()]
    update = torch.cat([(after - before).flatten() for after, before in pairs])
    if not bool((update.abs() <= limit).all()):
        worst = float(update.abs().max())
        raise ValueError(f"a parameter changed by {worst:g}, and privacy.range={limit:g} is the limit")
    return (update * (STEPS / limit)).round().long().numpy().view(np.uint64)


def dequantised(total: Words, weight: int, reference: Tensors, limit: float) -> Tensors:
    """`reference + total / weight`, the mean model of a sum of weighted quantised updates.

    Raises `ValueError` where the sum is larger than updates within ± `limit` can make it.
    """
    steps, most = torch.from_numpy(total.view(np.int64).copy()), STEPS * weight
    if not 0 < most < 2**63:
        raise ValueError(f"the clients have {weight} samples")
    if not bool(((-most <= steps) & (steps <= most)).all()):
        raise ValueError("it is larger than the clients' updates can make it")
    update = steps.double() * (limit / STEPS / weight)
    parts = torch.split(update, [tensor.numel() for tensor in reference.values()])
    return {
        name: (before.cpu() + part.reshape(before.shape)).to(before.dtype)
        for (name, before), part in zip(reference.items(), parts, strict=True)
    }


@dataclass(frozen=True)
class Summand:
    """One record's part of a client's vector."""

    record: str
    reference: Tensors
    """What clients were sent, in the order of names; 0 where they were sent nothing of it."""
    owners: bool
    """Whether only some clients have it. Then the sum of their weights is one more number of the vector."""
    bounded: bool = False

    def limit(self, limit: float) -> float:
        """What its updates are within, where those of other records are within ± `limit`."""
        return VOTES if self.bounded else limit

    @property
    def size(self) -> int:
        """Numbers in the vector."""
        return sum(tensor.numel() for tensor in self.reference.values()) + self.owners


def summands(
    sums: Iterable[Sum], exchange: str, like: Mapping[str, Tensors], sent: Mapping[str, Tensors]
) -> list[Summand]:
    """The parts of a vector, in the order of names, the same at the server and at each client.

    `like` has tensors of the shapes of all records that there may be; `sent` are those of the request.
    """
    found = []
    for name in sorted(like):
        for each in sums:
            if each.exchange == exchange and fnmatchcase(name, each.record):
                before = sent.get(name, {})
                zeros = {key: torch.zeros_like(like[name][key]) for key in sorted(like[name])}
                reference = {key: before.get(key, zero) for key, zero in zeros.items()}
                found.append(Summand(name, reference, each.weight == "owner", each.bounded))
    return found


def vector(parts: Sequence[Summand], own: Mapping[str, Tensors], weight: int, limit: float) -> Words:
    """A client's weighted updates in whole steps, one after the other; 0 for a record that it does not have.

    Raises `ValueError` where one is out of range (`quantised`), or a record is missing that all have.
    """
    words = []
    for part in parts:
        there = part.record in own
        if not there and not part.owners:
            raise ValueError(f"record {part.record!r} is missing")
        size = part.size - part.owners
        update = np.zeros(size, dtype=np.uint64)
        if there:
            update = quantised(own[part.record], part.reference, part.limit(limit))
        words += [update * np.uint64(weight), np.array([weight * there][: part.owners], dtype=np.uint64)]
    return np.concatenate(words)


def means_of_sum(total: Words, parts: Sequence[Summand], weight: int, limit: float) -> dict[str, Tensors]:
    """The means of a sum of vectors by record; none of one that nobody has. Raises as `dequantised`."""
    found, first = {}, 0
    for part in parts:
        own, first = total[first : first + part.size], first + part.size
        count = int(own[-1]) if part.owners else weight
        if count > weight:
            raise ValueError("more clients have a record than there are")
        if count:
            steps = own[: part.size - part.owners]
            found[part.record] = dequantised(steps, count, part.reference, part.limit(limit))
    return found


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor that can travel."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """What `as_tensor` was given."""
    return tensor.cpu().numpy().tobytes()
