"""Streams: in order, beside the caller and beside each other, with errors at synchronise."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import normgrad
from normgrad import ContractError, Stream
from support.failing import failing_plan
from support.processes import run_python

PATIENCE = 30.0  # seconds until a test gives up; none waits that long when all is well
X = np.arange(12, dtype=np.float32).reshape(3, 4)
STATISTICS = np.ones((3, 1), np.float32)


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    made.synchronize(PATIENCE)


class Gate:
    """Work that holds a stream up until the gate is opened."""

    def __init__(self, stream: Stream) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        stream.submit(self._wait)
        assert self.reached.wait(PATIENCE)

    def _wait(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


def _plan(out: np.ndarray, x: np.ndarray = X) -> normgrad.Plan:
    return normgrad.layer_norm_backward.plan(
        x, x, [4], STATISTICS, STATISTICS, output_mask=(True, False, False), out=(out, None, None)
    )


def test_a_stream_says_what_it_has_to_do() -> None:
    stream, started, go_on = Stream(), threading.Event(), threading.Event()
    assert repr(stream) == "<Stream: idle>"

    def work() -> None:
        started.set()
        go_on.wait(60)

    stream.submit(work)
    assert started.wait(60)
    assert repr(stream) == "<Stream: 1 task to do>"
    stream.submit(lambda: [][0])
    assert repr(stream) == "<Stream: 2 tasks to do>"
    go_on.set()
    with pytest.raises(IndexError):
        stream.synchronize()
    assert repr(stream) == "<Stream: idle>"
    stream.submit(lambda: [][0])
    while not stream.query():
        pass
    assert repr(stream) == "<Stream: idle, an error waits for synchronize()>"
    with pytest.raises(IndexError):
        stream.synchronize()


def test_in_order(stream: Stream) -> None:
    seen: list[int] = []
    for number in range(200):
        stream.submit(lambda number=number: seen.append(number))
    stream.synchronize(PATIENCE)
    assert seen == list(range(200))


def test_a_run_returns_before_the_work_is_done(backend: str, stream: Stream) -> None:
    out = np.full((3, 4), 7, np.float32)
    gate = Gate(stream)
    plan = _plan(out)
    plan.run(stream=stream)
    assert not stream.query()
    assert (out == 7).all()
    with pytest.raises(ContractError, match="runs once"):
        plan.run(stream=stream)  # spent when it is given, not when it is done
    gate.open()
    stream.synchronize(PATIENCE)
    assert stream.query()
    np.testing.assert_array_equal(out, normgrad.layer_norm_backward(X, X, [4], STATISTICS, STATISTICS)[0])


def test_plans_on_one_stream_see_what_those_before_wrote(backend: str, stream: Stream) -> None:
    first, second = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
    gate = Gate(stream)
    _plan(first).run(stream=stream)
    _plan(second, first).run(stream=stream)
    gate.open()
    stream.synchronize(PATIENCE)
    expected, _, _ = normgrad.layer_norm_backward(first, first, [4], STATISTICS, STATISTICS)
    np.testing.assert_array_equal(second, expected)
    assert first.any()


def test_tensors_may_go_once_run_has_returned(backend: str, stream: Stream) -> None:
    out = np.zeros((3, 4), np.float32)
    gate = Gate(stream)
    plan = _plan(out, X * 2)
    plan.run(np.empty(plan.workspace_size, np.uint8), stream=stream)
    del plan
    _ = [np.full((3, 4), 9, np.float32) for _ in range(100)]  # would lie where freed memory was
    gate.open()
    stream.synchronize(PATIENCE)
    np.testing.assert_array_equal(out, normgrad.layer_norm_backward(X * 2, X * 2, [4], STATISTICS, STATISTICS)[0])


def test_streams_run_side_by_side() -> None:
    streams = [Stream() for _ in range(3)]
    meeting = threading.Barrier(3, timeout=PATIENCE)
    for each in streams:
        each.submit(lambda: meeting.wait() and None)
    for each in streams:
        each.synchronize(PATIENCE)


def test_an_error_surfaces_at_synchronise_and_once(stream: Stream) -> None:
    done: list[str] = []

    def fail(text: str) -> None:
        raise KeyError(text)

    stream.submit(lambda: fail("first"))
    stream.submit(lambda: fail("second"))
    stream.submit(lambda: done.append("after"))
    with pytest.raises(KeyError, match="first"):
        stream.synchronize(PATIENCE)
    stream.synchronize(PATIENCE)
    assert done == ["after"]


def test_an_error_of_a_plans_work_surfaces_at_synchronise(stream: Stream) -> None:
    failing_plan().run(stream=stream)
    with pytest.raises(ContractError) as caught:
        stream.synchronize(PATIENCE)
    assert caught.value.status == 361001
    stream.synchronize(PATIENCE)


def test_a_refused_run_gives_the_stream_nothing(backend: str, stream: Stream) -> None:
    out = np.full((3, 4), 7, np.float32)
    plan = _plan(out)
    with pytest.raises(ContractError):
        plan.run([], stream=stream)
    stream.synchronize(PATIENCE)
    assert (out == 7).all()


def test_work_that_waits_for_its_own_stream_is_an_error_and_no_deadlock(stream: Stream) -> None:
    stream.submit(stream.synchronize)
    with pytest.raises(RuntimeError, match="waits for the stream itself"):
        stream.synchronize(PATIENCE)
    polled: list[bool] = []
    stream.submit(lambda: polled.append(stream.query()))
    stream.synchronize(PATIENCE)
    assert polled == [False]


def test_one_streams_error_is_not_anothers(stream: Stream) -> None:
    other = Stream()
    other.submit(lambda: {}["missing"])
    stream.synchronize(PATIENCE)
    with pytest.raises(KeyError):
        other.synchronize(PATIENCE)


def test_timeout(stream: Stream) -> None:
    gate = Gate(stream)
    with pytest.raises(TimeoutError, match="still at work"):
        stream.synchronize(0.01)
    gate.open()
    stream.synchronize(PATIENCE)


def test_an_idle_stream_has_nothing_to_wait_for(stream: Stream) -> None:
    assert stream.query()
    stream.synchronize(0)


def test_synchronise_waits_for_what_was_given_before_it_alone(stream: Stream) -> None:
    """Work that goes on for ever, each piece giving the next, must not hold it up."""
    ended = threading.Event()

    def on_and_on() -> None:
        if not ended.wait(0.001):
            stream.submit(on_and_on)

    stream.submit(on_and_on)
    try:
        stream.synchronize(PATIENCE / 10)
    finally:
        ended.set()


def test_from_many_threads(stream: Stream) -> None:
    seen: list[tuple[int, int]] = []

    def give(thread: int) -> None:
        for number in range(100):
            stream.submit(lambda number=number: seen.append((thread, number)))
        stream.synchronize(PATIENCE)
        assert [n for t, n in list(seen) if t == thread] == list(range(100))

    failures: list[BaseException] = []

    def guarded(thread: int) -> None:
        try:
            give(thread)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(seen) == 800


def test_a_stream_and_a_plan_may_be_used_in_the_middle_of_their_own_calls() -> None:
    """As a signal handler or a finalizer does it, in the thread that holds their locks."""
    printed = run_python(
        """
import faulthandler
import numpy as np, normgrad
faulthandler.dump_traceback_later(30, exit=True)
x, out, ones = np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32), np.ones((3, 1), np.float32)
plan = normgrad.layer_norm_backward.plan(
    x, x, [4], ones, ones, output_mask=(True, False, False), out=(out, None, None))
plan.repeatable = True
stream = normgrad.Stream()
with stream._queue.lock, plan._lock:
    plan.run(stream=stream)
    stream.synchronize()
    print(stream.query(), stream)
"""
    )
    assert printed == "True <Stream: idle>\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_after_a_fork_the_stream_starts_empty_and_works() -> None:
    printed = run_python(
        """
import os, threading, warnings
from normgrad import Stream
warnings.simplefilter("ignore")  # newer Pythons warn of any fork beside threads
stream, reached, go = Stream(), threading.Event(), threading.Event()
stream.submit(lambda: (reached.set(), go.wait(30)))
stream.submit(lambda: print("parent", flush=True))
reached.wait(30)
child = os.fork()
if child == 0:
    stream.synchronize(30)
    stream.submit(lambda: print("child", flush=True))
    stream.synchronize(30)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
go.set()
stream.synchronize(30)
"""
    )
    assert printed.split() == ["child", "parent"]


def test_work_is_finished_before_the_interpreter_ends() -> None:
    printed = run_python(
        """
import time
from normgrad import Stream
stream = Stream()
stream.submit(lambda: time.sleep(0.3))
stream.submit(lambda: print("done", flush=True))
"""
    )
    assert printed.split() == ["done"]


# Where the stream's thread does not start


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No thread can be started, until the patch is undone."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield patch


def test_without_threads_the_caller_does_the_work(backend: str, stream: Stream, no_threads: pytest.MonkeyPatch) -> None:
    out = np.full((3, 4), 7, np.float32)
    seen: list[threading.Thread] = []
    stream.submit(lambda: seen.append(threading.current_thread()))
    _plan(out).run(stream=stream)
    assert stream.query()
    stream.synchronize(0)
    assert seen == [threading.main_thread()]
    np.testing.assert_array_equal(out, normgrad.layer_norm_backward(X, X, [4], STATISTICS, STATISTICS)[0])
    no_threads.undo()
    stream.submit(lambda: seen.append(threading.current_thread()))
    stream.synchronize(PATIENCE)
    assert seen[1] is not threading.main_thread()


def test_without_threads_an_error_surfaces_at_synchronise_too(stream: Stream, no_threads: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    stream.submit(lambda: {}["missing"])
    stream.submit(lambda: done.append("after"))
    with pytest.raises(KeyError):
        stream.synchronize(0)
    assert done == ["after"]


def test_without_threads_work_may_submit_work(stream: Stream, no_threads: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def again() -> None:
        seen.append(len(seen))
        if len(seen) < 3:
            stream.submit(again)

    stream.submit(again)
    for _ in range(3):
        stream.synchronize(0)
    assert seen == [0, 1, 2]


def test_without_threads_an_interrupt_of_the_work_is_the_callers(
    stream: Stream, no_threads: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.submit(interrupt)
    stream.submit(lambda: done.append("after"))
    stream.synchronize(0)
    assert done == ["after"]


@pytest.mark.parametrize("has_started", [False, True])
def test_an_interrupt_while_the_thread_is_started(
    has_started: bool, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if has_started:
            start(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.submit(lambda: done.append(1))
    stream.synchronize(PATIENCE)
    assert done == [1]
    stream.submit(lambda: done.append(2))
    stream.synchronize(PATIENCE)
    assert done == [1, 2]


def test_polling_gets_on_after_an_interrupt(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    reached = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.submit(reached.set)
    stream.query()
    assert reached.wait(PATIENCE)


@pytest.mark.parametrize("raised", ["RuntimeError('shutdown')", "KeyboardInterrupt"])
def test_the_process_ends_though_the_thread_did_not_start(raised: str) -> None:
    """As in Python 3.12 and later, where handlers of atexit can start no thread."""
    printed = run_python(
        f"""
import atexit, threading
from normgrad import Stream
stream = Stream()
def start(thread):
    threading.Thread.start = usual
    raise {raised}
usual, threading.Thread.start = threading.Thread.start, start
try:
    stream.submit(lambda: print("done", flush=True))
except KeyboardInterrupt:
    pass
"""
    )
    assert printed.split() == ["done"]


def test_work_submitted_at_exit_is_done() -> None:
    printed = run_python(
        """
import atexit
from normgrad import Stream
stream = Stream()
atexit.register(lambda: stream.submit(lambda: print("done", flush=True)))
"""
    )
    assert printed.split() == ["done"]
