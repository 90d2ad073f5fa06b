"""Streams and events."""

from __future__ import annotations

from normgrad.sdk import native
from normgrad.sdk.contexts import StreamOfContext, current_context, required, stream_of
from normgrad.sdk.devices import Mark
from normgrad.sdk.errors import AclError, Refused
from normgrad.sdk.exported import exported
from normgrad.sdk.handles import handles


def _give(result: int, made: object) -> None:
    """Write a new handle to the caller's variable; where that fails, there is none."""
    handle = handles.add(made)
    try:
        native.write(result, "Q", handle)
    except BaseException:
        handles.remove(handle, object)
        raise


@exported("aclrtCreateStream")
def create_stream(result: int) -> None:
    """Make a stream on the device of the thread's context."""
    required(result, "stream")
    _give(result, StreamOfContext(current_context().index))


@exported("aclrtCreateStreamWithConfig")
def create_stream_with_config(result: int, priority: int, flag: int) -> None:
    """The same; all streams have one priority."""
    create_stream(result)


@exported("aclrtDestroyStream")
def destroy_stream(handle: int) -> None:
    """Wait for a stream's work and end it."""
    required(handle, "stream")
    stream = stream_of(handle)
    if handles.remove(handle, StreamOfContext) is not None:
        stream.work.synchronize()


@exported("aclrtSynchronizeStream")
def synchronize_stream(handle: int) -> None:
    """Wait for a stream's work and report an error of it."""
    stream_of(handle).work.synchronize()


@exported("aclrtSynchronizeStreamWithTimeout")
def synchronize_stream_with_timeout(handle: int, milliseconds: int) -> None:
    """The same, for so long at most; -1 is for ever."""
    if milliseconds < -1:
        raise Refused(AclError.RT_PARAM_INVALID, f"timeout is {milliseconds}, and must be -1 (for ever) or more")
    try:
        stream_of(handle).work.synchronize(None if milliseconds == -1 else milliseconds / 1000)
    except TimeoutError:
        raise Refused(AclError.RT_WAIT_TIMEOUT, f"the stream was still at work after {milliseconds} ms") from None


@exported("aclrtStreamQuery")
def query_stream(handle: int, result: int) -> None:
    """0 when all work is done, 1 when not."""
    required(result, "status")
    native.write(result, "i", 0 if stream_of(handle).work.query() else 1)


class Event:
    """A mark that can be set in streams, again and again."""

    mark: Mark | None = None


def _event_of(handle: int, name: str = "event") -> Event:
    found = handles.find(required(handle, name), Event)
    if found is None:
        raise Refused(AclError.RT_INVALID_HANDLE, f"{name} {handles.problem(handle, 'event')}")
    return found


@exported("aclrtCreateEvent")
def create_event(result: int) -> None:
    """Make an event."""
    required(result, "event")
    current_context()
    _give(result, Event())


@exported("aclrtCreateEventWithFlag")
def create_event_with_flag(result: int, flag: int) -> None:
    """The same; every event keeps the time and can be waited for."""
    create_event(result)


@exported("aclrtDestroyEvent")
def destroy_event(handle: int) -> None:
    """End an event; streams that wait for it still see it come."""
    _event_of(handle)
    handles.remove(handle, Event)


@exported("aclrtRecordEvent")
def record_event(handle: int, stream: int) -> None:
    """Set the mark after the stream's work so far."""
    event = _event_of(handle)
    event.mark = stream_of(stream).work.record()


@exported("aclrtResetEvent")
def reset_event(handle: int, stream: int) -> None:
    """Forget the mark."""
    event = _event_of(handle)
    stream_of(stream)
    event.mark = None


@exported("aclrtQueryEventStatus")
def query_event(handle: int, result: int) -> None:
    """1 when the mark was passed, 0 when not, or when there is none."""
    event = _event_of(handle)
    required(result, "status")
    native.write(result, "i", 1 if event.mark is not None and event.mark.query() else 0)


@exported("aclrtSynchronizeEvent")
def synchronize_event(handle: int) -> None:
    """Wait until the mark is passed; at once when there is none."""
    mark = _event_of(handle).mark
    if mark is not None:
        mark.wait()


@exported("aclrtStreamWaitEvent")
def stream_wait_event(stream: int, handle: int) -> None:
    """Let the stream's later work wait for the mark."""
    event = _event_of(handle)
    work = stream_of(stream).work
    if event.mark is not None:
        work.wait_for(event.mark)


@exported("aclrtEventElapsedTime")
def event_elapsed_time(result: int, start: int, end: int) -> None:
    """Milliseconds from one mark to another."""
    required(result, "ms")
    marks = []
    for name, handle in (("startEvent", start), ("endEvent", end)):
        mark = _event_of(handle, name).mark
        if mark is None or not mark.query():
            raise Refused(
                AclError.RT_PARAM_INVALID, f"{name} has not happened: record it in a stream and synchronise first"
            )
        marks.append(mark)
    native.write(result, "f", marks[1].milliseconds_since(marks[0]))
