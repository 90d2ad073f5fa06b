"""Contexts, and which of them each thread works in."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from normgrad.sdk import native
from normgrad.sdk.devices import DeviceStream, devices
from normgrad.sdk.errors import AclError, Refused
from normgrad.sdk.exported import exported
from normgrad.sdk.handles import handles


class StreamOfContext:
    """A stream and the device that it works on."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.work: DeviceStream = devices().stream(index)
        with _streams_lock:
            _streams.add(self)


_streams_lock = threading.Lock()
_streams: weakref.WeakSet[StreamOfContext] = weakref.WeakSet()


class Context:
    """What a thread works in: a device, its default stream and its system parameters."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.alive = True
        self.parameters: dict[int, int] = {}
        self.default_stream = StreamOfContext(index)
        self.handle = handles.add(self)

    def end(self) -> None:
        self.alive = False
        handles.remove(self.handle, Context)
        self.default_stream.work.synchronize()


class _OfDevice:
    """The default context of a device, while somebody has the device set."""

    def __init__(self, index: int) -> None:
        self.context = Context(index)
        self.setters = 0


class _Thread(threading.local):
    context: Context | None = None


_thread = _Thread()
_lock = threading.Lock()
_defaults: dict[int, _OfDevice] = {}


def current_context() -> Context:
    """The calling thread's context; without one the call is refused."""
    context = _thread.context
    if context is None or not context.alive:
        raise Refused(
            AclError.RT_CONTEXT_NULL,
            "this thread has no context: call aclrtSetDevice or aclrtSetCurrentContext in it first",
        )
    return context


def required(pointer: int, name: str) -> int:
    """A pointer that must not be null."""
    if not pointer:
        raise Refused(AclError.INVALID_PARAM, f"{name} is null, and must be given")
    return pointer


def _known_device(index: int) -> int:
    count = devices().count()
    if not 0 <= index < count:
        raise Refused(AclError.RT_INVALID_DEVICEID, f"deviceId is {index}, and must be 0 to {count - 1}")
    return index


@exported("aclrtSetDevice")
def set_device(index: int) -> None:
    """Make the device's default context the thread's."""
    _known_device(index)
    with _lock:
        if index not in _defaults:
            _defaults[index] = _OfDevice(index)
        _defaults[index].setters += 1
        _thread.context = _defaults[index].context


@exported("aclrtResetDevice")
def reset_device(index: int) -> None:
    """Undo one aclrtSetDevice; the last one ends the default context, after its work."""
    _known_device(index)
    with _lock:
        found = _defaults.get(index)
        if found is None:
            return
        found.setters -= 1
        if found.setters:
            return
        del _defaults[index]
    found.context.end()


@exported("aclrtGetDevice")
def get_device(result: int) -> None:
    """The device of the thread's context."""
    native.write(required(result, "deviceId"), "i", current_context().index)


@exported("aclrtGetDeviceCount")
def get_device_count(result: int) -> None:
    """How many devices there are."""
    native.write(required(result, "count"), "I", devices().count())


@exported("aclrtCreateContext")
def create_context(result: int, index: int) -> None:
    """Make a context and make it the thread's."""
    required(result, "context")
    context = Context(_known_device(index))
    try:
        native.write(result, "Q", context.handle)
    except BaseException:
        context.end()
        raise
    _thread.context = context


def _context_of(handle: int) -> Context:
    found = handles.find(required(handle, "context"), Context)
    if found is None:
        raise Refused(AclError.RT_INVALID_HANDLE, f"context {handles.problem(handle, 'context')}")
    return found


@exported("aclrtDestroyContext")
def destroy_context(handle: int) -> None:
    """End a context that aclrtCreateContext made, after its work."""
    context = _context_of(handle)
    with _lock:
        if any(default.context is context for default in _defaults.values()):
            raise Refused(
                AclError.RT_PARAM_INVALID,
                "context is the default one of its device, and goes with aclrtResetDevice, not aclrtDestroyContext",
            )
    context.end()


@exported("aclrtSetCurrentContext")
def set_current_context(handle: int) -> None:
    """Make a context the thread's."""
    _thread.context = _context_of(handle)


@exported("aclrtGetCurrentContext")
def get_current_context(result: int) -> None:
    """The thread's context."""
    native.write(required(result, "context"), "Q", current_context().handle)


@exported("aclrtSynchronizeDevice")
def synchronize_device() -> None:
    """Wait for all streams of the thread's device."""
    finish(current_context().index)


def finish(index: int | None = None) -> None:
    """Wait for all streams, or for those of one device; then raise the first error of their work."""
    first: BaseException | None = None
    with _streams_lock:
        streams = list(_streams)
    for stream in streams:
        if index is None or stream.index == index:
            try:
                stream.work.synchronize()
            except Exception as error:
                first = first or error
    if first is not None:
        raise first


def stream_of(handle: int) -> StreamOfContext:
    """The stream of a handle; null is the default stream of the thread's context."""
    if not handle:
        return current_context().default_stream
    found: Any = handles.find(handle, StreamOfContext)
    if found is None:
        raise Refused(AclError.RT_INVALID_HANDLE, f"stream {handles.problem(handle, 'stream')}")
    return found
