"""Compiled code on disk: in the user's cache, a file for each variant of a kernel.

Files appear whole or not at all, so any number of processes may start at once. A file says what it was made of and
carries a checksum: what is damaged or made of something else counts as absent. What nobody has used for a long time is
removed when something new is kept.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ENVIRONMENT = "NORMGRAD_CACHE_DIR"

_DIGEST = hashlib.sha256().digest_size
_UNFINISHED = ".unfinished-"
_DAY = 24 * 60 * 60
_KEPT = 90 * _DAY  # seconds after a file's last use


def folders() -> Iterator[Path]:
    """Where code may be kept, the best place first: what the environment names, or the user's cache, or a folder of
    the user's own among the temporary files.
    """
    given = os.environ.get(ENVIRONMENT, "")
    if given:
        yield Path(given)
        return
    with suppress(RuntimeError):  # a user without a home
        yield _users_cache() / "normgrad"
    yield _temporary()


def _temporary() -> Path:
    mine = f"normgrad-{os.getuid()}" if hasattr(os, "getuid") else "normgrad"
    return Path(tempfile.gettempdir()) / mine


def _users_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _is_safe(folder: Path) -> bool:
    """Whether nobody else can have put code there: a name among the temporary files is for anyone to take."""
    if folder != _temporary():
        return True
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return False
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _file(name: str, key: str) -> str:
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.code"


def find(name: str, key: str) -> bytes | None:
    """The code that was kept under a key; None where there is none, or none that is whole."""
    for folder in folders():
        with suppress(OSError):
            if _is_safe(folder):
                path = folder / _file(name, key)
                code = _unpacked(path.read_bytes(), key)
                if code is not None:
                    _note_use(path)
                    return code
    return None


def keep(name: str, key: str, code: bytes) -> Path | None:
    """Keep code under a key, in the first place that takes it; None where there is no such place."""
    for folder in folders():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_safe(folder):
                path = _written(folder / _file(name, key), _packed(key, code))
                _clear(folder)
                return path
    return None


def _note_use(path: Path) -> None:
    """A file's time is that of its last use, to the day."""
    with suppress(OSError):  # a cache that can only be read is as good
        if time.time() - path.stat().st_mtime > _DAY:
            os.utime(path)


def _clear(folder: Path) -> None:
    """Remove code that is no longer used, and what processes left that were stopped while they wrote."""
    now = time.time()
    for pattern, age in (("*.code", _KEPT), (f"{_UNFINISHED}*", _DAY)):
        for path in folder.glob(pattern):
            with suppress(OSError):
                if now - path.stat().st_mtime > age:
                    path.unlink()


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
