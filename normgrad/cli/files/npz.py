"""``.npz``: NumPy's archive of arrays.

NumPy forgets the name of a bfloat16: its archives hold two bytes of no type (``V2``). So an entry named ``bfloat16``
lists the arrays that are bfloat16. They may be stored as ``V2`` or as ``uint16``; a ``V2`` that is not listed is
taken for bfloat16 as well, since nothing else is written that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from normgrad.cli.errors import BadInput

#: The entry that lists the arrays of bfloat16.
LIST = "bfloat16"
_RAW = np.dtype("V2")

# How a ZIP archive, an empty one, NumPy's single array and a pickle begin. NumPy takes anything else for a pickle.
_STARTS = (b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY", b"\x80")
_LONGEST_START = 6


def require() -> None:
    """NumPy is always there."""


def load(stream: BinaryIO, accept: Callable[[Iterable[str]], Any]) -> dict[str, Any]:
    """The arrays of an archive; unpacked, an entry may be a thousand times as large as the file."""
    try:
        entries = _entries(stream, accept)
    except ValueError as error:
        if "max_header_size" in str(error):
            raise BadInput("is not a valid .npz file: an array's header is too long") from None
        if "pickle" in str(error):
            raise BadInput("holds pickled objects, and those are never loaded") from None
        raise
    listed = _listed(entries)
    return {name: _typed(name, array, name in listed) for name, array in entries.items()}


def _entries(stream: BinaryIO, accept: Callable[[Iterable[str]], Any]) -> dict[str, np.ndarray]:
    start = stream.read(_LONGEST_START)
    stream.seek(0)
    if not start.startswith(_STARTS):
        raise BadInput("is not a valid .npz file: it is not an archive (numpy.savez writes one)")
    archive = np.load(stream, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise BadInput("is a single array, and must be an archive of named ones (numpy.savez writes it)")
    with archive:
        if len(set(archive.files)) < len(archive.files):
            raise BadInput("has two entries of one name")
        accept(name for name in archive.files if name != LIST)
        return {name: _native(name, archive[name]) for name in archive.files}


def _native(name: str, entry: Any) -> np.ndarray:
    if not isinstance(entry, np.ndarray):
        raise BadInput(f"{name} is not an array")
    return entry.astype(entry.dtype.newbyteorder("="), copy=False)


def _listed(entries: dict[str, np.ndarray]) -> set[str]:
    """The names in the list, which is taken out of the entries."""
    names = entries.pop(LIST, None)
    if names is None:
        return set()
    if names.dtype.kind not in "US" and names.size:
        raise BadInput(f"the entry {LIST} must list names of arrays, and holds {names.dtype}")
    listed = {str(name) for name in names.astype(str).ravel()}
    unknown = sorted(listed - set(entries))
    if unknown:
        raise BadInput(f"the entry {LIST} lists {', '.join(unknown)}, which the file does not hold")
    return listed


def _typed(name: str, array: np.ndarray, is_listed: bool) -> np.ndarray:
    if is_listed and array.dtype not in (_RAW, np.uint16):
        raise BadInput(f"{name} is listed as {LIST}, must be stored as V2 or uint16, and is {array.dtype}")
    return array.view(ml_dtypes.bfloat16) if is_listed or array.dtype == _RAW else array


def save(stream: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an archive, with the list where it is needed."""
    brief = [name for name, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]
    entries = {name: array.view(_RAW) if name in brief else array for name, array in arrays.items()}
    if brief:
        entries[LIST] = np.array(brief)
    np.savez(stream, **entries)  # type: ignore[arg-type]
