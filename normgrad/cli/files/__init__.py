"""Files of named arrays: ``.npz``, ``.safetensors`` and ``.pt``, told apart by suffix. Nothing is ever unpickled.

In memory a file is a dictionary: NumPy arrays (bfloat16 by ml_dtypes), and plain Python values where the format holds
such.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from normgrad.cli.errors import BadInput, reason
from normgrad.cli.files import npz, pt, safetensors

#: Takes the names that a file holds, and raises BadInput for those that it must not hold.
Accept = Callable[[Iterable[str]], Any]


class Format(Protocol):
    """How one kind of file is read and written; a module."""

    def require(self) -> None:
        """Raise BadInput where the library that the format needs is not installed."""

    def load(self, stream: BinaryIO, accept: Accept) -> dict[str, Any]:
        """What the file holds; BadInput, or any exception of the library's own, where it is not valid.

        ``accept`` gets the names before anything is unpacked, where the format can tell them.
        """

    def save(self, stream: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
        """Write arrays."""


FORMATS: dict[str, Format] = {".npz": npz, ".safetensors": safetensors, ".pt": pt}


def format_of(path: Path) -> Format:
    """The format that the suffix names, ready for use."""
    try:
        found = FORMATS[path.suffix.lower()]
    except KeyError:
        *others, last = FORMATS
        raise BadInput(f"{path}: the file name must end in {', '.join(others)} or {last}") from None
    found.require()
    return found


def check_exists(path: Path) -> None:
    """Raise BadInput where there is neither a file nor a folder of this name."""
    if not os.path.exists(path):  # Path.exists raises where a name is too long
        raise BadInput(f"{path}: there is no such file or folder")


def in_folder(folder: Path) -> dict[str, Path]:
    """The files of a folder that can be read, by their names without the suffix."""
    found: dict[str, Path] = {}
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() in FORMATS:
                if path.stem in found:
                    raise BadInput(f"{folder}: has two files of the name {path.stem}")
                found[path.stem] = path
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read: {reason(error)}") from None
    return found


def cases_in(folder: Path) -> dict[str, Path]:
    """The same of a folder of cases, which must hold some."""
    found = in_folder(folder)
    if not found:
        raise BadInput(f"{folder}: holds no cases ({', '.join(FORMATS)})")
    return found


def make_folder(folder: Path) -> None:
    """Create a folder to write to, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise BadInput(f"{folder}: is a file, and must be a folder") from None
    except OSError as error:
        raise BadInput(f"{folder}: cannot be created: {reason(error)}") from None


def read(path: Path, accept: Accept = list) -> dict[str, Any]:
    """What a file holds, by name; ``accept`` may refuse its names."""
    file_format = format_of(path)
    try:
        if path.is_dir():
            raise BadInput(f"{path}: is a folder, and must be a file")
        stream = path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {reason(error)}") from None
    with stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what comes of a file is its content or one error
        try:
            content = file_format.load(stream, accept)
            accept(content)
            return content
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        except MemoryError:
            raise BadInput(f"{path}: says that it holds more than there is memory for") from None
        except Exception as error:  # whatever a library makes of a broken file, it is the file that is wrong
            raise BadInput(f"{path}: is not a valid {path.suffix} file: {reason(error)}") from None


def check_writable(path: Path) -> None:
    """Raise BadInput where :func:`write` is bound to fail, so that nothing is computed in vain."""
    format_of(path)
    target = _target(path)
    try:
        if target.exists() and not target.is_file():
            raise BadInput(f"{path}: is not a file, and cannot be replaced by one")
        if not target.parent.is_dir():
            raise BadInput(f"{path}: cannot be written: there is no folder {target.parent}")
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {reason(error)}") from None


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a file: all of it, or nothing."""
    file_format = format_of(path)
    check_writable(path)
    with replaced(path) as stream:
        file_format.save(stream, arrays)


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its place when the block ends well, and until then leaves the old one."""
    target = _target(path)
    unfinished = target.with_name(f".normgrad-{secrets.token_hex(8)}")  # short, whatever the target's name
    try:
        with unfinished.open("xb") as stream:
            yield stream
        unfinished.replace(target)
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
        raise BadInput(f"{path}: cannot be written: {reason(error)}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """The file behind a symbolic link, which stays a link."""
    return Path(os.path.realpath(path))
