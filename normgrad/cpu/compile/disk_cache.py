"""The kernel cache: compiled kernels on disk, one file per kernel variant.

The files hold native code, which is loaded into the process. A folder is therefore used only if it belongs to the user
and nobody else can write to it, however it is named, and a file only under the same condition; symbolic links are not
followed. Where no folder qualifies, kernels are compiled in every process, and one warning says why.

A file is written under another name and renamed when it is complete, so any number of processes may start at once and
a killed one leaves nothing that is read. It holds its key and a checksum: a file that is damaged, or that was made from
another source, counts as absent. Writing a file removes those that were not used for a long time.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from normgrad.log import warn_once

ENVIRONMENT = "NORMGRAD_CACHE_DIR"

_DIGEST = hashlib.sha256().digest_size
_UNFINISHED = ".unfinished-"
_FILE_NAME = re.compile(r"(.+)-[0-9a-f]{24}\.code")
_DAY = 24 * 60 * 60
_KEPT = 90 * _DAY  # seconds after a file's last use
_MOST_BYTES = 256 << 20  # of all files, a few thousand kernels
_MOST_BYTES_A_FILE = 16 << 20  # the largest kernels have 0.1 MB

# Without O_NONBLOCK the open of a named pipe waits for a writer.
_READ_FLAGS = os.O_RDONLY
for _flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
    _READ_FLAGS |= getattr(os, _flag, 0)


def folders() -> Iterator[Path]:
    """Yield the folders that may hold the cache, in order of preference: the one that the environment names, or the
    user's cache folder and a folder among the temporary files.
    """
    given = os.environ.get(ENVIRONMENT, "")
    if given:
        yield Path(given)
        return
    with suppress(RuntimeError):  # a user without a home
        yield _users_cache() / "normgrad"
    yield _temporary()


def _temporary() -> Path:
    mine = f"normgrad-{os.geteuid()}" if hasattr(os, "geteuid") else "normgrad"
    return Path(tempfile.gettempdir()) / mine


def _users_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _fault(found: os.stat_result) -> str | None:
    """Return why somebody else may have written a file or folder, or None. Windows has no such owners and modes."""
    if not hasattr(os, "geteuid"):
        return None
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and must belong to user {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written to by others (mode {stat.S_IMODE(found.st_mode):o}), and must not be (chmod go-w)"
    return None


def _folder_fault(folder: Path) -> str | None:
    """Return why a folder cannot be used, or None.

    Someone who can write to the folder's parent may exchange the folder after this check: a file that is opened in it
    has to pass :func:`_fault` as well.
    """
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link, and must be a folder"
    return _fault(found)


def _file(name: str, key: str) -> str:
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.code"


def find(name: str, key: str) -> bytes | None:
    """Return the code that was stored under a key, or None."""
    for folder in folders():
        with suppress(OSError):
            if _folder_fault(folder) is None:
                code = _read(folder / _file(name, key), key)
                if code is not None:
                    return code
    return None


def _read(path: Path, key: str) -> bytes | None:
    with os.fdopen(os.open(path, _READ_FLAGS), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or _fault(found) or found.st_size > _MOST_BYTES_A_FILE:
            return None
        code = _unpacked(file.read(found.st_size), key)
        if code is not None and time.time() - found.st_mtime > _DAY:
            with suppress(OSError):  # on a read-only file system
                # A file's time is that of its last use, to the day.
                os.utime(file.fileno() if os.utime in os.supports_fd else path)
    return code


def keep(name: str, key: str, code: bytes) -> Path | None:
    """Store code under a key, in the first folder that takes it; None where there is no such folder."""
    faults = []
    for folder in folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fault = _folder_fault(folder)
            if fault is None:
                path = _written(folder / _file(name, key), _packed(key, code))
                _clear(folder)
                return path
        except OSError as error:
            fault = _reason(error)
        faults.append(f"{folder} {fault}")
    warn_once(f"compiled kernels cannot be kept on disk, so every process compiles its own: {'; '.join(faults)}")
    return None


def _reason(error: OSError) -> str:
    """Return why a folder cannot be used, of the error that it gave."""
    if isinstance(error, FileExistsError):
        return "is a file, and must be a folder"
    return f"cannot be written to: {error.strerror or error}"


@dataclass(frozen=True)
class Stored:
    """A file of the cache: the kernel's name, its size and when it was last used (seconds since 1970, to the day)."""

    kernel: str
    path: Path
    nbytes: int
    last_used: float


def stored(folder: Path) -> list[Stored]:
    """Return the kernels that a folder holds, by name."""
    found = []
    for path, status in _files(folder):
        is_kernel = _FILE_NAME.fullmatch(path.name)
        if is_kernel and stat.S_ISREG(status.st_mode):
            found.append(Stored(is_kernel[1], path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda file: file.path.name)


def problem_of(folder: Path) -> str | None:
    """Return why a folder cannot hold the cache, or None. Permissions do not tell, so it is tried; no trace is left."""
    created = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = _folder_fault(folder)
        if fault is None:
            handle, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=folder)
            os.close(handle)
            os.unlink(name)
        return fault
    except OSError as error:
        return _reason(error)
    finally:
        for path in created:
            with suppress(OSError):
                path.rmdir()


def _clear(folder: Path) -> None:
    """Remove code that is no longer used, the oldest beyond a total size, and what killed processes left."""
    now, total = time.time(), 0
    for path, found in sorted(_files(folder), key=lambda file: -file[1].st_mtime):
        is_finished = path.suffix == ".code"
        total += found.st_size
        if now - found.st_mtime > (_KEPT if is_finished else _DAY) or (is_finished and total > _MOST_BYTES):
            with suppress(OSError):
                path.unlink()


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for pattern in ("*.code", f"{_UNFINISHED}*"):
        for path in folder.glob(pattern):
            with suppress(OSError):  # another process has removed it
                yield path, path.lstat()


def _written(path: Path, data: bytes) -> Path:
    handle, temporary = tempfile.mkstemp(prefix=_UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def _packed(key: str, code: bytes) -> bytes:
    head = key.encode()
    body = len(head).to_bytes(8, "little") + head + code
    return hashlib.sha256(body).digest() + body


def _unpacked(data: bytes, key: str) -> bytes | None:
    digest, body = data[:_DIGEST], data[_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        return None
    end = 8 + int.from_bytes(body[:8], "little")
    return body[end:] if body[8:end] == key.encode() else None
