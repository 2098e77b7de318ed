"""From texts to ids of tokens: by a tokenizer's file that a run announces, or by hashing words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import PAD

if TYPE_CHECKING:
    from torch import Tensor

WORDS = re.compile(r"\w+|[^\w\s]")
"""A word, or a mark."""
BUCKETS = 2**14
"""Ids of hashed words, unless told otherwise."""
LONGEST_TEXT = 100_000
"""Tokens of a text."""


def text_ids(texts: Sequence[str], length: int, vocabulary: int, tokenizer: str = "", digest: str = "") -> Tensor:
    """The first `length` tokens of each text (n, length) int64, `PAD` behind its end.

    Without a tokenizer's file an id is the hash of a word or mark, in small letters. A text without a token has
    the one 0. Raises `UserError` for a file that is not here, is not that of the digest, or has more ids.
    """
    import torch

    if tokenizer:
        found = [encoded.ids for encoded in _tokenizer(tokenizer, digest, vocabulary).encode_batch(list(texts))]
    else:
        found = [[_hashed(word, vocabulary) for word in WORDS.findall(text.lower())] for text in texts]
    ids = torch.full((len(texts), length), PAD, dtype=torch.int64)
    for row, own in enumerate(found):
        own = own[:length] or [0]
        ids[row, : len(own)] = torch.tensor(own)
    return ids


def tokenizer_facts(path: Path) -> dict[str, Any]:
    """What is announced of a tokenizer's file: place, digest, and how many ids it has. Raises `UserError`."""
    whole = path.expanduser().absolute()
    digest = sha256(_content(whole)).hexdigest()
    size = _loaded(whole, digest).get_vocab_size()
    return {"tokenizer": str(whole), "tokenizer_digest": digest, "vocabulary": size}


@lru_cache(maxsize=2**16)
def _hashed(word: str, vocabulary: int) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little") % vocabulary


def _tokenizer(file: str, digest: str, vocabulary: int) -> Any:
    found = _loaded(Path(file), digest)
    if (size := found.get_vocab_size()) > vocabulary:
        raise UserError(f"scenario.vocabulary: {vocabulary} is not possible; the tokenizer has {size} ids")
    return found


@lru_cache(maxsize=2)
def _loaded(path: Path, digest: str) -> Any:
    """A tokenizer that neither pads nor cuts."""
    not_here = f"scenario.tokenizer: {path.name} of the run is not at this site; put it there"
    try:
        content = _content(path)
    except UserError as error:
        raise UserError(str(error), not_here) from None
    if (found := sha256(content).hexdigest()) != digest:
        raise UserError(
            f"scenario.tokenizer: {path} is another file than that of the run (SHA-256 {found[:12]}…, and the run "
            f"has {digest[:12] or 'none'}…); put that one there",
            not_here,
        )
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "scenario.tokenizer: this needs the extra perennial[transformers], which is not installed; in the "
            "project's folder: uv sync --inexact --extra transformers"
        ) from None
    try:
        made = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"scenario.tokenizer: {path} is no file of Hugging Face's tokenizers ({why})") from None
    made.no_padding()
    made.no_truncation()
    return made


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"scenario.tokenizer: {path} cannot be read ({error.strerror})") from None
