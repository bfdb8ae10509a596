"""A corpus on disk as a source of drafts: what followed contexts in the user's own texts.

The file holds the tokens of all texts and their positions sorted by the context that ends there, read backwards: a
suffix array (Manber and Myers 1993) of the reversed corpus. So a context of any length up to `max_match` is one run of
positions, a context longer by one token a run within it, and the tokens behind those positions are what followed.
The arrays are mapped into memory: a file takes no time to open beyond one check of its sums, and processes share it.

Shapes: T tokens with separators, S sorted positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import uuid
import weakref
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_treespec.draft.ngram_index import Match
from hf_treespec.errors import TreeConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["CorpusIndex", "build_corpus_index", "open_corpus_index", "tokenizer_fingerprint"]

_MAGIC = b"treespec"
_VERSION = 1
_PREFIX = struct.Struct("<8sIII")  # magic, version, length and checksum of the header
_ALIGNED = 64
_ARRAYS = ("tokens", "order", "starts")
_REMEDY = "make it anew with `treespec index`"
# Between texts, and `max_match` times in front of the first: no context reaches over it.
_BREAK = -1
# Followers read of one context, spread evenly over its occurrences.
_READ = 64
# Contexts told of a match, the longest first.
_CONTEXTS = 4


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of which ids stand for which tokens: equal for tokenizers whose ids mean the same.

    Remembered as long as the tokenizer lives and has as many tokens.

    Raises:
        TreeConfigError: if it does not tell its vocabulary.
    """
    try:
        size = len(tokenizer)
        kept = _FINGERPRINTS.get(tokenizer)
        if kept is None or kept[0] != size:
            known = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
            kept = _FINGERPRINTS[tokenizer] = size, hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise TreeConfigError(
            f"tokenizer={type(tokenizer).__name__}(...): expected one of transformers, which tells its vocabulary: "
            f"{error}"
        ) from error
    return kept[1]


_FINGERPRINTS: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()


class CorpusIndex:
    """An open index.

    Args:
        path: where it lies.
        header: see `build_corpus_index`.
        arrays: tokens `[T]`, order `[S]` and starts `[V + 1]`.
    """

    def __init__(self, path: Path, header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        self.path = path
        self.vocab_size: int = header["vocab_size"]
        self.max_match: int = header["max_match"]
        self.fingerprint: str | None = header["fingerprint"]
        self.texts: int = header["texts"]
        self._tokens, self._order, self._starts = (arrays[name] for name in _ARRAYS)

    def __len__(self) -> int:
        """Tokens of all texts."""
        return len(self._tokens) - self.max_match - self.texts

    def matches(self, backwards: Iterable[int]) -> list[Match]:
        """Contexts that the corpus knows, the longest first; see `ContextSource`."""
        tokens, order = self._tokens, self._order
        runs: list[tuple[int, int, int]] = []
        low, high = 0, len(order)
        for length, token in enumerate(backwards):
            if length >= self.max_match or not 0 <= token < self.vocab_size:
                break
            if not length:
                low, high = int(self._starts[token]), int(self._starts[token + 1])
            else:

                def before(place: int, length: int = length) -> int:
                    return int(tokens[order[place] - length])

                run = range(low, high)
                low, high = (
                    low + bisect_left(run, token, key=before),
                    low + bisect_right(run, token, key=before),
                )
            if low == high:
                break
            if runs and runs[-1][2] - runs[-1][1] == high - low:
                runs.pop()
            runs.append((length + 1, low, high))
        return [Match(length, self._followers(low, high)) for length, low, high in reversed(runs[-_CONTEXTS:])]

    def _followers(self, low: int, high: int) -> dict[int, int]:
        """Counts of the tokens behind a run of positions, the most frequent last."""
        read = np.linspace(low, high - 1, min(high - low, _READ)).astype(np.int64)
        found, counts = np.unique(self._tokens[self._order[read].astype(np.int64) + 1], return_counts=True)
        rising = np.argsort(counts, kind="stable")
        return dict(zip(found[rising].tolist(), counts[rising].tolist(), strict=True))


def build_corpus_index(
    texts: Iterable[Sequence[int]],
    path: str | Path,
    *,
    vocab_size: int,
    fingerprint: str | None = None,
    max_match: int = 16,
) -> Path:
    """Write the index of some texts. Needs some 80 bytes of memory and 8 of disk a token; a million takes a second.

    Args:
        texts: token ids of each.
        path: of the file; it is replaced in one step, so that readers of an old one are not disturbed.
        vocab_size: of the model whose text it is to draft.
        fingerprint: of the tokenizer, see `tokenizer_fingerprint`; None if it is not known.
        max_match: longest context that can be looked up, in tokens.

    Returns:
        The path.

    Raises:
        TreeConfigError: if an id lies outside of the vocabulary, nothing follows anything, or `max_match` is wrong.
    """
    target = Path(path)
    if not 1 <= max_match <= 1024:
        raise TreeConfigError(f"max_match={max_match}: expected an integer in [1, 1024]")
    pieces: list[NDArray[np.int32]] = [np.full(max_match, _BREAK, np.int32)]
    count = 0
    for count, text in enumerate(texts, start=1):
        ids = _ids(text, count - 1)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise TreeConfigError(
                f"text {count - 1} has ids from {ids.min()} to {ids.max()}: expected [0, vocab_size={vocab_size}"
                "); was it encoded by another tokenizer?"
            )
        pieces += [ids.astype(np.int32), np.full(1, _BREAK, np.int32)]
    tokens = np.concatenate(pieces)
    order = _sorted_places(tokens, max_match)
    if not len(order):
        raise TreeConfigError(f"{count} texts without two tokens in a row: nothing to index")
    lasts = tokens[order]
    arrays: dict[str, NDArray[Any]] = {
        "tokens": tokens,
        "order": order.astype(np.int32 if len(tokens) < 2**31 else np.int64),
        "starts": np.searchsorted(lasts, np.arange(vocab_size + 1)).astype(np.int64),
    }
    header = {
        "vocab_size": vocab_size,
        "max_match": max_match,
        "fingerprint": fingerprint,
        "texts": count,
        "arrays": {
            name: {"dtype": array.dtype.str, "length": len(array), "crc32": zlib.crc32(array.data)}
            for name, array in arrays.items()
        },
    }
    _write(target, json.dumps(header).encode(), arrays)
    return target


def _ids(text: Sequence[int], place: int) -> NDArray[np.int64]:
    """The ids of a text."""
    fault = f"text {place}: expected a flat sequence of token ids, got {str(text)[:60]}"
    try:
        ids = np.asarray(text)
    except ValueError as error:
        raise TreeConfigError(fault) from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TreeConfigError(fault)
    return ids.astype(np.int64)


def _sorted_places(tokens_T: NDArray[np.int32], max_match: int) -> NDArray[np.int64]:
    """Positions that a token follows, by the context that ends there read backwards; equal ones in order of place."""
    # Prefix doubling: ranks of contexts of one length give those of twice that length.
    ranks = np.unique(tokens_T, return_inverse=True)[1].reshape(-1).astype(np.int64)
    length = 1
    while length < max_match:
        step = min(length, max_match - length)
        longer = np.zeros_like(ranks)
        # In front of the text there are breaks only, which rank lowest.
        longer[step:] = ranks[:-step]
        keys = ranks * (int(ranks.max()) + 1) + longer
        ranks = np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.int64)
        length += step
    order = np.argsort(ranks, kind="stable")
    followed = np.append(tokens_T[1:] != _BREAK, False) & (tokens_T != _BREAK)
    places: NDArray[np.int64] = order[followed[order]]
    return places


def _write(target: Path, header: bytes, arrays: dict[str, NDArray[Any]]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not a private temporary file: an index is for whoever may read the folder.
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with part.open("xb") as file:
            file.write(_PREFIX.pack(_MAGIC, _VERSION, len(header), zlib.crc32(header)) + header)
            for array in arrays.values():
                file.write(b"\0" * (-file.tell() % _ALIGNED))
                file.write(array.data)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def open_corpus_index(
    path: str | Path, *, vocab_size: int | None = None, fingerprint: str | None = None
) -> CorpusIndex:
    """Open an index that `build_corpus_index` wrote. Its sums are checked once per process and file.

    Args:
        path: of the file.
        vocab_size: of the model; None not to compare.
        fingerprint: of its tokenizer; None not to compare.

    Raises:
        TreeConfigError: if there is no such file, it is damaged or of another version, or it is of another vocabulary.
    """
    file = Path(path).expanduser()
    try:
        about = file.stat()
        index = _opened(file.resolve(), about.st_mtime_ns, about.st_size)
    except OSError as error:
        raise TreeConfigError(f"corpus index {file}: cannot be read: {error.strerror or error}; {_REMEDY}") from error
    if vocab_size is not None and index.vocab_size != vocab_size:
        raise TreeConfigError(
            f"corpus index {file}: it is of a vocabulary of {index.vocab_size} ids, the model has {vocab_size}; "
            f"{_REMEDY} for this model"
        )
    if None not in (fingerprint, index.fingerprint) and index.fingerprint != fingerprint:
        raise TreeConfigError(
            f"corpus index {file}: it is of the tokenizer {index.fingerprint}, this one is {fingerprint}: their ids "
            f"mean different tokens; {_REMEDY} for this model"
        )
    return index


@lru_cache(maxsize=8)
def _opened(file: Path, modified: int, size: int) -> CorpusIndex:
    """The index in a file of this age and size."""
    with file.open("rb") as opened:
        # Private: nothing is written, and a file that is replaced meanwhile stays as it was opened.
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    header, end = _header(file, data)
    arrays = {}
    try:
        for name in _ARRAYS:
            said = header["arrays"][name]
            end += -end % _ALIGNED
            array = np.frombuffer(data, np.dtype(said["dtype"]), said["length"], end)
            end += array.nbytes
            if zlib.crc32(array.data) != said["crc32"]:
                raise TreeConfigError(f"corpus index {file}: damaged: {name} does not have its checksum; {_REMEDY}")
            arrays[name] = array
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TreeConfigError):
            raise
        raise TreeConfigError(f"corpus index {file}: damaged: {error}; {_REMEDY}") from error
    if end != size:
        raise TreeConfigError(f"corpus index {file}: damaged: {size} bytes instead of {end}; {_REMEDY}")
    return CorpusIndex(file, header, arrays)


def _header(file: Path, data: Any) -> tuple[dict[str, Any], int]:
    """The header, and where it ends."""
    if len(data) < _PREFIX.size or data[: len(_MAGIC)] != _MAGIC:
        raise TreeConfigError(f"corpus index {file}: not a corpus index; {_REMEDY}")
    _, version, length, checksum = _PREFIX.unpack_from(data)
    if version != _VERSION:
        raise TreeConfigError(f"corpus index {file}: version {version}, this release reads {_VERSION}; {_REMEDY}")
    end = _PREFIX.size + length
    raw = bytes(data[_PREFIX.size : end])
    if len(raw) < length or zlib.crc32(raw) != checksum:
        raise TreeConfigError(f"corpus index {file}: damaged: its header does not have its checksum; {_REMEDY}")
    return json.loads(raw), end
