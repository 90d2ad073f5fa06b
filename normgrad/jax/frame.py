"""What XLA hands to a foreign function, read in place: the call frame of its C interface, major version 0.

Within a major version fields are only ever added at the end of these structures, so those named here stay in place.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType

_MAJOR = 0
_METADATA = 1  # an extension's type
_INTERNAL = 13  # an error's code
_DTYPES: dict[int, DType] = {10: FLOAT16, 11: FLOAT32, 16: BFLOAT16}

_HEAD = (("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (*_HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _Version))


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _ErrorArguments(ctypes.Structure):
    _fields_ = (*_HEAD, ("message", ctypes.c_char_p), ("code", ctypes.c_int))


class _Api(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("create_error", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Buffers(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("items", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Text(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Attributes(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.POINTER(_Text))),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


#: A buffer's dtype and dimensions.
Layout = tuple[DType, tuple[int, ...]]
Serve = Callable[[bytes, tuple[Layout, ...], list[int]], None]
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))


def handler(serve: Serve, include_dir: str) -> Any:
    """A foreign function for XLA: calls of it, with one attribute of text, become calls of ``serve``.

    ``serve`` gets the text, and the layouts and addresses of the arguments and then of the results. ``include_dir`` is
    where XLA's headers lie. The caller keeps the handler alive.
    """
    minor = _minor_version(include_dir)

    def handle(pointer: Any) -> int | None:
        frame = pointer.contents
        try:
            if frame.extension:
                _answer_question(frame.extension, minor)
                return None
            layouts: list[Layout] = []
            addresses: list[int] = []
            for buffers in (frame.arguments, frame.results):
                items = buffers.items
                for i in range(buffers.size):
                    buffer = items[i].contents
                    layouts.append((_DTYPES[buffer.dtype], tuple(buffer.dims[: buffer.rank])))
                    addresses.append(buffer.data or 0)
            text = frame.attributes.values[0].contents
            serve(ctypes.string_at(text.data, text.size), tuple(layouts), addresses)
        except BaseException as error:  # XLA's caller gets it, whatever it is
            return _error(frame, f"{type(error).__name__}: {error}")
        return None

    return _Handler(handle)


def _minor_version(include_dir: str) -> int:
    """The running minor version, from XLA's header: XLA may ask for it before it tells its own."""
    text = Path(include_dir, "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    major, minor = (
        int(re.findall(rf"^#define XLA_FFI_API_{part} (\d+)", text, re.M)[0]) for part in ("MAJOR", "MINOR")
    )
    if major != _MAJOR:
        raise ImportError(f"normgrad.jax knows version {_MAJOR} of XLA's foreign functions, and this JAX has {major}")
    return minor


def _answer_question(address: int | None, minor: int) -> None:
    """Tell XLA the version of its interface that the function keeps to. Any other extension may change what a call
    means, and is refused.
    """
    while address:
        extension = _Extension.from_address(address)
        if extension.type != _METADATA:
            raise NotImplementedError(
                f"the call frame has an extension of type {extension.type}, which normgrad.jax does not know: "
                "use another version of JAX"
            )
        version = extension.metadata.contents.version
        version.major, version.minor = _MAJOR, minor
        address = extension.next


def _error(frame: _CallFrame, message: str) -> int | None:
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, message.encode(errors="replace"), _INTERNAL)
    created: int | None = frame.api.contents.create_error(ctypes.byref(arguments))
    return created
