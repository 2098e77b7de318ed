"""The masks of secure aggregation, computed a second time from the standards: RFC 7748, 5869 and 8439."""

import hmac
import struct
from hashlib import sha256
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from perennial.common.privacy.secure_aggregation import mask, pair_mask, public, shared_key

PRIME = 2**255 - 19
BASE = (9).to_bytes(32, "little")


def x25519(scalar: bytes, point: bytes) -> bytes:
    """The Montgomery ladder of RFC 7748, section 5."""
    k = int.from_bytes(scalar, "little") & ~7 & ~(1 << 255) | 1 << 254
    u = int.from_bytes(point, "little") & (2**255 - 1)
    x2, z2, x3, z3, swap = 1, 0, u, 1, 0
    for place in reversed(range(255)):
        bit = k >> place & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a, b * b, d * a, c * b
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % PRIME, u * (da - cb) ** 2 % PRIME
        x2, z2 = aa * bb % PRIME, e * (aa + 121665 * e) % PRIME
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, PRIME - 2, PRIME) % PRIME).to_bytes(32, "little")


def hkdf(secret: bytes, purpose: str) -> bytes:
    """RFC 5869 with SHA-256 and no salt, one block."""
    extracted = hmac.digest(bytes(32), secret, sha256)
    return hmac.digest(extracted, purpose.encode() + b"\1", sha256)


def chacha20(key: bytes, size: int) -> npt.NDArray[np.uint64]:
    """Words of the key stream with nonce 0 from block 0 on (RFC 8439, section 2.3)."""
    turn = lambda x, n: (x << np.uint32(n)) | (x >> np.uint32(32 - n))  # noqa: E731
    blocks = -(-8 * size // 64)
    start = np.zeros((16, blocks), np.uint32)
    start[:12] = np.array(struct.unpack("<12I", b"expand 32-byte k" + key), np.uint32)[:, None]
    start[12] = np.arange(blocks)
    s = start.copy()
    columns = [(p, p + 4, p + 8, p + 12) for p in range(4)]
    diagonals = [(p, (p + 1) % 4 + 4, (p + 2) % 4 + 8, (p + 3) % 4 + 12) for p in range(4)]
    for a, b, c, d in (columns + diagonals) * 10:
        for first, second, third, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[first] += s[second]
            s[third] = turn(s[third] ^ s[first], by)
    return np.ascontiguousarray((s + start).T).reshape(-1).view(np.uint64)[:size]


def test_the_second_implementation_keeps_to_the_standards_own_examples() -> None:
    """RFC 7748, 5.2; RFC 8439, A.1, test vector 1."""
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    assert x25519(scalar, point).hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    assert chacha20(bytes(32), 1).tobytes() == bytes.fromhex("76b8e0ada0f13d90")


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
def test_the_mask_of_a_key_is_chacha20(size: int) -> None:
    key = sha256(b"a key").digest()
    assert (chacha20(key, size) == mask(key, size)).all()


def test_the_mask_of_a_pair_is_made_of_both_keys() -> None:
    one, other = (sha256(name).digest() for name in (b"one", b"other"))
    common = hkdf(x25519(one, x25519(other, BASE)), "mask")
    assert common == shared_key(other, public(one), "mask")
    assert (pair_mask(one, public(other), "client-1", "client-2", 50) == chacha20(common, 50)).all()
    assert (pair_mask(other, public(one), "client-2", "client-1", 50) == np.negative(chacha20(common, 50))).all()


def test_a_sum_is_opened_by_the_second_implementation_after_a_client_has_dropped_out() -> None:
    """What the server does: it takes off the seeds of those who stayed, and the masks of who did not."""
    size, names = 40, ["client-0", "client-1", "client-2", "client-3"]
    secret = {name: sha256(b"mask" + name.encode()).digest() for name in names}
    seed = {name: sha256(b"seed" + name.encode()).digest() for name in names}
    update = {n: np.random.default_rng(p).integers(-100, 100, size).view(np.uint64) for p, n in enumerate(names)}
    sent = {}
    for name in names:
        masks = [pair_mask(secret[name], public(secret[o]), name, o, size) for o in names if o != name]
        sent[name] = sum(masks, start=update[name] + mask(seed[name], size))
    stayed = names[:3]
    opened = sum((sent[name] - chacha20(seed[name], size) for name in stayed), start=np.zeros(size, np.uint64))
    for name in stayed:
        common = chacha20(hkdf(x25519(secret["client-3"], x25519(secret[name], BASE)), "mask"), size)
        opened -= common  # each of them is before client-3, so it had added the mask
    assert (opened == sum(update[name] for name in stayed)).all()
    for one, other in combinations(stayed, 2):
        assert not (sent[one] + sent[other] == update[one] + update[other]).any()
