"""The dispatch cache: calls of a known layout give the same results and the same refusals, and leave nothing behind."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normgrad
from normgrad.contract import arrays
from normgrad.cpu.prepare.launch import Step
from normgrad.operators import OPERATORS, dispatch
from support.processes import run_python
from support.recipes import RECIPES, valid_calls

ROWS, COLUMNS = 4, 6

pytestmark = pytest.mark.usefixtures("misses")


def _call(shape: tuple[int, int] = (ROWS, COLUMNS), dtype: Any = np.float32, seed: int = 0) -> tuple[Any, ...]:
    """The arguments of LayerNorm's backward pass."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    data = rng.standard_normal((2, *shape), np.float32).astype(dtype)
    statistics = rng.uniform(0.5, 1.5, (2, rows, 1)).astype(np.float32)
    vectors = rng.standard_normal((2, columns), np.float32).astype(dtype)
    return (*map(np.array, data), (columns,), *map(np.array, statistics), *map(np.array, vectors))


def _cached_call(**more: Any) -> tuple[Any, ...]:
    normgrad.layer_norm_backward(*_call(**more))
    return _call(**more)


def _numpy(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args


def _tensors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in args)


def _outputs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays for the results, full of NaN."""
    empty_like = np.empty_like if isinstance(args[1], np.ndarray) else torch.empty_like
    outputs = tuple(empty_like(args[position]) for position in (1, 5, 5))
    for output in outputs:
        output[...] = float("nan")
    return outputs


def _same_bits(found: Any, expected: Any) -> bool:
    return all(
        (one is None and other is None) or np.asarray(one).tobytes() == np.asarray(other).tobytes()
        for one, other in zip(found, expected, strict=True)
    )


LIBRARIES = pytest.mark.parametrize("library", [_numpy, _tensors], ids=["numpy", "torch"])
Library = Callable[[tuple[Any, ...]], tuple[Any, ...]]


# The same results


@pytest.mark.parametrize("operator", RECIPES)
def test_a_call_gives_the_same_bits_again(operator: str, backend: str, misses: list[str]) -> None:
    calls = 0

    @settings(max_examples=40)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        nonlocal calls
        case = data.draw(valid_calls(operator))
        before = case.arena.memory.copy()
        first = [_bits(result) for result in case.call()]
        after = case.arena.memory.copy()
        for _ in range(2):
            calls += 1
            case.arena.memory[...] = before
            results = case.call()
            assert [_bits(result) for result in results] == first
            assert case.arena.memory.tobytes() == after.tobytes()
            for output, brought, result in zip(case.outputs, case.out, results, strict=True):
                assert (result is None) == (not output.wanted)
                assert brought is None or not output.wanted or result is brought

    holds()
    # A layout whose written arrays partly overlap others is not cached.
    assert len(misses) < 2 * calls


def _bits(result: Any) -> bytes:
    if result is None:
        return b""
    if isinstance(result, torch.Tensor):
        result = result.double().numpy()  # NumPy has no bfloat16 for it; NaN stays NaN
    return result.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(2, 2), (16, 64), (128, 768), (333, 777), (512, 1024)])
def test_the_second_call_is_a_hit(shape: tuple[int, int], dtype: Any, misses: list[str]) -> None:
    """Of small calls and of calls on several threads."""
    for seed in range(3):
        args = _call(shape, dtype, seed)
        found = normgrad.layer_norm_backward(*args)
        assert len(misses) == 1
        outputs = tuple(map(np.empty_like, found))
        normgrad.layer_norm_backward.plan(*args, out=outputs).run()
        assert _same_bits(found, outputs)
        assert [(one.dtype, one.shape, one.flags.c_contiguous) for one in found] == [
            (one.dtype, one.shape, True) for one in outputs
        ]


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_is_cached(operator: str, misses: list[str]) -> None:
    x, vector, statistics = np.ones((2, 4, 3), np.float32), np.ones(4, np.float32), np.ones((2, 2), np.float32)
    rows, ranks = np.ones((2, 4, 1), np.float32), np.ones((5, 4), np.float32)
    args: dict[str, tuple[Any, ...]] = {
        "layer_norm_backward": (x, x, [3], rows, rows),
        "layer_norm": (x, [3]),
        "group_norm_backward": (x, x, statistics, statistics, vector, 2, 4, 3, 2),
        "group_norm": (x, vector, vector, 2, 4, 3, 2),
        "batch_norm_elemt_backward": (x, x, *[vector] * 5, np.ones(5, np.int32)),
        "batch_norm_stats": (x, 1e-5),
        "batch_norm_gather_stats_with_counts": (x, ranks, ranks, vector, None, 0.1, 1e-5, np.ones(5, np.int32)),
        "batch_norm_elemt": (x, None, vector, vector, vector),
        "batch_norm_reduce_backward": (x, x, *[vector] * 3, True, False, True),
    }
    for library in (_numpy, _tensors):
        for _ in range(3):
            getattr(normgrad, operator)(*library(args[operator]))
    assert misses == [operator] * 2


def test_arguments_by_name_and_by_default(misses: list[str]) -> None:
    grad_out, x, shape, mean, rstd, weight, bias = _cached_call()
    del misses[:]
    expected = normgrad.layer_norm_backward(grad_out, x, shape, mean, rstd, weight, bias, (True, True, True))
    others = (
        normgrad.layer_norm_backward(grad_out, x, list(shape), mean, rstd, weight, bias, [True, True, True]),
        normgrad.layer_norm_backward(grad_out, x, torch.Size(shape), mean, rstd, weight, bias=bias),
        normgrad.layer_norm_backward(
            bias=bias, weight=weight, rstd=rstd, mean=mean, normalized_shape=shape, input=x, grad_out=grad_out
        ),
    )
    assert all(_same_bits(other, expected) for other in others)
    assert misses == []
    without_bias = normgrad.layer_norm_backward(grad_out, x, shape, mean, rstd, weight)
    assert misses == ["layer_norm_backward"]
    assert _same_bits(without_bias, expected)


def test_a_part_of_an_array_at_any_offset(misses: list[str]) -> None:
    _, *rest = _call()
    whole = np.random.default_rng(1).standard_normal((10, ROWS, COLUMNS), np.float32)
    for part in whole:
        expected = normgrad.layer_norm_backward(part.copy(), *rest)
        assert _same_bits(normgrad.layer_norm_backward(part, *rest), expected)
    assert len(misses) == 1


@pytest.mark.parametrize("change", ["transposed", "reversed", "read-only", "misaligned in a vector", "empty"])
def test_layouts_whose_address_the_buffer_protocol_does_not_give(change: str, misses: list[str]) -> None:
    shape = (0, COLUMNS) if change == "empty" else (ROWS, COLUMNS)
    for seed in range(3):
        args = _call(shape, seed=seed)
        expected = normgrad.layer_norm_backward(*args)
        x = args[0]
        if change == "transposed":
            x = np.asfortranarray(x)
        elif change == "reversed":
            x = x[::-1].copy()[::-1]
        elif change == "read-only":
            x.flags.writeable = False
        elif change == "misaligned in a vector":
            x = np.concatenate([[np.float32(0)], x.ravel()])[1:].reshape(shape)
        assert _same_bits(normgrad.layer_norm_backward(x, *args[1:]), expected)
    assert len(misses) == (2 if change in ("transposed", "reversed") else 1)


def test_arrays_over_memory_of_another_library(misses: list[str]) -> None:
    """Read from a buffer, or shared with a tensor: not every array owns its memory or is a view of one that does."""
    for seed in range(3):
        args = _call(seed=seed)
        expected = normgrad.layer_norm_backward(*args)
        del misses[:]
        x = np.frombuffer(args[0].tobytes(), np.float32).reshape(ROWS, COLUMNS)
        found = normgrad.layer_norm_backward(x, torch.from_numpy(args[1]).numpy(), *args[2:])
        assert _same_bits(found, expected)
        assert misses == []


def test_arrays_and_tensors_in_one_call(misses: list[str]) -> None:
    for seed in range(3):
        args = _call(seed=seed)
        mixed = (torch.from_numpy(args[0]), *args[1:3], *_tensors(args[3:5]), *args[5:])
        assert _same_bits(normgrad.layer_norm_backward(*mixed), normgrad.layer_norm_backward(*args))
    assert len(misses) == 2


# Outputs of the caller's


@LIBRARIES
def test_given_outputs_are_written(library: Library, misses: list[str]) -> None:
    for seed in range(3):
        args = library(_call(seed=seed))
        expected, outputs = normgrad.layer_norm_backward(*args), _outputs(args)
        del misses[:]
        results = normgrad.layer_norm_backward(*args, out=outputs)
        assert all(result is output for result, output in zip(results, outputs, strict=True))
        assert _same_bits(results, expected)
        assert len(misses) == (seed == 0)


@LIBRARIES
def test_some_given_some_allocated_some_not_wanted(library: Library, misses: list[str]) -> None:
    for seed in range(2):
        args = library(_call(seed=seed))
        expected, (grad_input, _, grad_bias) = normgrad.layer_norm_backward(*args), _outputs(args)
        del misses[:]
        results = normgrad.layer_norm_backward(
            *args, output_mask=(True, True, False), out=(grad_input, None, grad_bias)
        )
        assert results[0] is grad_input
        assert results[2] is None
        assert _same_bits(results[:2], expected[:2])
        assert np.isnan(np.asarray(grad_bias)).all()
        assert len(misses) == (seed == 0)


@LIBRARIES
def test_in_place_calls_have_an_entry_of_their_own(library: Library, misses: list[str]) -> None:
    for number, in_place in enumerate((False, True, False, True)):
        args = library(_call(seed=number))
        expected, (grad_input, *others) = normgrad.layer_norm_backward(*args), _outputs(args)
        del misses[:]
        results = normgrad.layer_norm_backward(*args, out=(args[1] if in_place else grad_input, *others))
        assert _same_bits(results, expected)
        assert len(misses) == (number < 2)


@LIBRARIES
def test_another_object_over_the_same_memory_is_noticed(library: Library) -> None:
    for number, in_place in enumerate((False, True, False, True, True)):
        args = library(_call(seed=number))
        expected, (grad_input, *others) = normgrad.layer_norm_backward(*args), _outputs(args)
        results = normgrad.layer_norm_backward(*args, out=(args[1][:] if in_place else grad_input, *others))
        assert _same_bits(results, expected)


@LIBRARIES
def test_partial_overlap_is_checked_every_time(library: Library, misses: list[str]) -> None:
    args = library(_cached_call())
    expected, (_, *others) = normgrad.layer_norm_backward(*args), _outputs(args)
    normgrad.layer_norm_backward(*args, out=_outputs(args))
    (memory,) = library((np.zeros((ROWS + 1, COLUMNS), np.float32),))
    for _ in range(2):
        memory[1:] = args[1]
        del misses[:]
        overlapping = (args[0], memory[1:], *args[2:])
        results = normgrad.layer_norm_backward(*overlapping, out=(memory[:ROWS], *others))
        assert _same_bits(results, expected)
        assert misses == ["layer_norm_backward"]


@LIBRARIES
def test_outputs_that_overlap_each_other_are_refused(library: Library) -> None:
    args = library(_call())
    for _ in range(2):
        normgrad.layer_norm_backward(*args, out=_outputs(args))
    grad_input, grad_weight, _ = _outputs(args)
    for same in ((grad_input, grad_weight, grad_weight), (grad_input, grad_input[1], grad_weight)):
        with pytest.raises(normgrad.ContractError, match="shares memory with"):
            normgrad.layer_norm_backward(*args, out=same)


def test_a_read_only_output_is_refused() -> None:
    args = _call()
    for _ in range(2):
        normgrad.layer_norm_backward(*args, out=_outputs(args))
    outputs = _outputs(args)
    outputs[0].flags.writeable = False
    with pytest.raises(normgrad.ContractError, match="is read-only"):
        normgrad.layer_norm_backward(*args, out=outputs)


@LIBRARIES
def test_running_statistics(library: Library, misses: list[str]) -> None:
    ones, expected = np.ones((2, 3), np.float32), np.zeros(3, np.float32)
    for call in range(3):
        data, ranks, mean, var, counts = library(
            (np.ones((4, 3, 2), np.float32), ones, expected.copy(), expected.copy(), np.array([4, 4], np.int32))
        )
        normgrad.batch_norm_gather_stats_with_counts(data, ranks, ranks, mean, var, 0.5, 0.0, counts)
        expected = expected + np.float32(0.5) * (1 - expected)
        np.testing.assert_array_equal(np.asarray(mean), expected)
        assert len(misses) == 1, call
    with pytest.raises(normgrad.ContractError, match="shares memory with"):
        normgrad.batch_norm_gather_stats_with_counts(data, ranks, ranks, mean, mean, 0.5, 0.0, counts)


def test_autograd_hears_of_every_write(misses: list[str]) -> None:
    args = _tensors(_call())
    outputs = _outputs(args)
    for _ in range(3):
        versions = [output._version for output in outputs]
        normgrad.layer_norm_backward(*args, out=outputs)
        assert [output._version for output in outputs] == [version + 1 for version in versions]
    assert len(misses) == 1


def test_outputs_are_none_of_the_arguments_by_position() -> None:
    args = (*_cached_call(), (True, True, True))
    outputs = _outputs(args)
    for _ in range(2):
        normgrad.layer_norm_backward(*args, out=outputs)
    with pytest.raises(TypeError):
        normgrad.layer_norm_backward(*args, *outputs)


# Bounded, the least recently used out first


def test_a_network_of_many_layouts_stays_cached(misses: list[str]) -> None:
    calls = [library(_call((3, columns))) for columns in range(1, 61) for library in (_numpy, _tensors)]
    for _ in range(3):
        for args in calls:
            normgrad.layer_norm_backward(*args)
    assert len(misses) == len(calls)


def test_the_least_recently_used_entry_is_evicted(monkeypatch: pytest.MonkeyPatch, misses: list[str]) -> None:
    monkeypatch.setattr(dispatch, "MAX_ENTRIES", 3)

    def missed(columns: int) -> bool:
        del misses[:]
        normgrad.layer_norm(np.ones((2, columns), np.float32), [columns])
        return bool(misses)

    assert [missed(columns) for columns in (1, 2, 3, 1, 4)] == [True, True, True, False, True]  # 2 is evicted
    assert [missed(columns) for columns in (1, 3, 4)] == [False] * 3
    assert missed(2)  # and evicts 1
    assert [missed(columns) for columns in (3, 4, 2, 1)] == [False, False, False, True]
    assert len(normgrad.layer_norm.dispatch._entries) == 3


# What differs is not the same call


def _swapped(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder())


@pytest.mark.parametrize(
    "changed",
    [_swapped, lambda x: x.astype(object), lambda x: x.astype(np.float64), lambda x: x[:-1]],
    ids=["swapped", "objects", "float64", "shorter"],
)
@pytest.mark.parametrize("position", [0, 1, 3, 5])
def test_a_wrong_array_is_refused_after_right_ones(changed: Any, position: int) -> None:
    args = list(_cached_call())
    args[position] = changed(args[position])
    with pytest.raises(normgrad.ContractError) as raised:
        normgrad.layer_norm_backward(*args)
    assert raised.value.status == 161002


@pytest.mark.parametrize("shape", [(COLUMNS, 2**70), (-(2**64) + COLUMNS,), (6.0,), ("6",), [[6]], None, "6"])
def test_a_wrong_shape_is_refused_after_a_right_one(shape: Any) -> None:
    args = _cached_call()
    with pytest.raises(normgrad.ContractError):
        normgrad.layer_norm_backward(*args[:2], shape, *args[3:])


def test_one_is_not_true(misses: list[str]) -> None:
    for _ in range(2):
        normgrad.layer_norm(np.ones((3, 1), np.float32), (1,), eps=1)
    del misses[:]
    normgrad.layer_norm(np.ones((3, 1), np.float32), (1,), eps=1.0)
    normgrad.layer_norm(np.ones((3, 1), np.float32), (True,), eps=1)
    assert misses == ["layer_norm"] * 2


def test_subclasses_are_checked_every_time(misses: list[str]) -> None:
    args = _cached_call()
    expected = normgrad.layer_norm_backward(*args)
    del misses[:]
    for subclass in (np.recarray, np.matrix, np.ma.MaskedArray) * 2:
        assert _same_bits(normgrad.layer_norm_backward(args[0].view(subclass), *args[1:]), expected)
    assert len(misses) == 6


def test_an_array_whose_memory_shrank_is_refused() -> None:
    args = _cached_call()
    owner = np.zeros(ROWS * COLUMNS, np.float32)
    part = owner.reshape(ROWS, COLUMNS)
    normgrad.layer_norm_backward(part, *args[1:])
    owner.resize(2, refcheck=False)
    with pytest.raises(normgrad.ContractError, match="outside its storage"):
        normgrad.layer_norm_backward(part, *args[1:])


def test_a_misaligned_array_is_refused() -> None:
    args = _cached_call()
    crooked = np.ndarray((ROWS, COLUMNS), np.float32, np.zeros(4 * ROWS * COLUMNS + 4, np.uint8), 2)
    with pytest.raises(normgrad.ContractError, match="must be aligned"):
        normgrad.layer_norm_backward(crooked, *args[1:])


def test_the_backend_and_the_product_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch, misses: list[str]) -> None:
    args = _cached_call()
    expected = normgrad.layer_norm_backward(*args)
    del misses[:]
    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    normgrad.layer_norm_backward(*args)
    assert misses == ["layer_norm_backward"]
    monkeypatch.delenv("NORMGRAD_BACKEND")
    with normgrad.use_product("Atlas 200I/500 A2"), pytest.raises(normgrad.ContractError) as raised:
        normgrad.layer_norm_backward(*args)
    assert raised.value.status == 561003
    with normgrad.use_product("Atlas A2"):
        del misses[:]
        results = [normgrad.layer_norm_backward(*args) for _ in range(3)]
    assert misses == ["layer_norm_backward"]
    assert all(_same_bits(result, expected) for result in results)
    normgrad.layer_norm_backward(*args)
    assert misses == ["layer_norm_backward"]


# Threads, signal handlers, finalizers


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_threads_get_what_each_asked_for() -> None:
    calls = [_call(seed=seed) for seed in range(4)]
    expected = [normgrad.layer_norm_backward(*args) for args in calls]

    def work(number: int) -> None:
        for _ in range(1000):
            assert _same_bits(normgrad.layer_norm_backward(*calls[number]), expected[number])

    _in_threads(4, work)


def test_threads_that_store_and_evict_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_ENTRIES", 8)
    expected = {columns: normgrad.layer_norm_backward(*_call((2, columns))) for columns in range(1, 31)}

    def work(number: int) -> None:
        order = np.random.default_rng(number).integers(1, 31, 300)
        for columns in map(int, order):
            found = normgrad.layer_norm_backward(*_call((2, columns)))
            assert _same_bits(found, expected[columns])

    _in_threads(6, work)
    assert len(normgrad.layer_norm_backward.dispatch._entries) <= 8


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals on this system")
def test_a_signal_handler_that_calls_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached and new layouts, in the middle of calls of both; small arrays that go through the workspace."""
    monkeypatch.setattr(dispatch, "MAX_ENTRIES", 4)
    args = _call()
    strided = (*(np.asfortranarray(data) for data in args[:2]), *args[2:])
    expected = normgrad.layer_norm_backward(*args)
    normgrad.layer_norm(args[1], [COLUMNS])  # compiled before the first signal
    sizes, wrong, interrupts = itertools.cycle(range(1, 12)), [], 0

    def handler(number: int, frame: Any) -> None:
        nonlocal interrupts
        interrupts += 1
        columns = next(sizes)
        found, *_ = normgrad.layer_norm(np.ones((5, columns), np.float32).T.copy().T, [columns])
        if found.any() or not _same_bits(normgrad.layer_norm_backward(*strided), expected):
            wrong.append("inside")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    try:
        while interrupts < 200:
            if not _same_bits(normgrad.layer_norm_backward(*args), expected):
                wrong.append("outside")
            if not _same_bits(normgrad.layer_norm_backward(*strided), expected):
                wrong.append("outside, strided")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert wrong == []


def test_a_call_between_the_steps_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler or a finalizer may make it: what the first step left in the workspace stays there."""

    def args(seed: int) -> tuple[Any, ...]:
        """With statistics whose rows have two strides, so that steps of their own copy them."""
        grad_out, x, shape, mean, rstd, weight, bias = _call(seed=seed)
        data = (one.reshape(2, -1, COLUMNS) for one in (grad_out, x))
        statistics = (np.asfortranarray(one.reshape(2, -1, 1)) for one in (mean, rstd))
        return *data, shape, *statistics, weight, bias

    grad_input, *others = normgrad.layer_norm_backward(*_call())
    expected = grad_input.reshape(2, -1, COLUMNS), *others
    run, steps = Step.run, 0

    def interrupted(self: Step, *given: Any) -> None:
        nonlocal steps
        run(self, *given)
        steps += 1
        if steps == 1:
            normgrad.layer_norm_backward(*args(1))

    monkeypatch.setattr(Step, "run", interrupted)
    for _ in range(3):
        steps = 0
        assert _same_bits(normgrad.layer_norm_backward(*args(0)), expected)
        assert steps == 6


@pytest.mark.parametrize("fails", [False, True])
def test_allocating_an_output_may_do_anything(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the cache, call the operator itself, or fail."""
    fresh = arrays._NumPy.fresh
    nested = armed = False

    def changed(self: Any, *layout: Any) -> Any:
        found = fresh(self, *layout)

        def allocate() -> Any:
            nonlocal nested
            if armed and not nested:
                nested = True
                normgrad.layer_norm_backward(*_call())
                normgrad.layer_norm_backward.dispatch.clear()
                gc.collect()
                nested = False
                if fails:
                    raise MemoryError("no room")
            return found.allocate()

        return dataclasses.replace(found, allocate=allocate)

    monkeypatch.setattr(arrays._NumPy, "fresh", changed)
    args = _call()
    expected = normgrad.layer_norm_backward(*args)
    for _ in range(4):
        armed = True
        if fails:
            with pytest.raises(normgrad.ContractError, match="no memory for the results: MemoryError: no room"):
                normgrad.layer_norm_backward(*args)
        else:
            assert _same_bits(normgrad.layer_norm_backward(*args), expected)
        armed = False
        assert _same_bits(normgrad.layer_norm_backward(*args), expected)


def test_arguments_that_change_during_a_call_are_not_cached(monkeypatch: pytest.MonkeyPatch, misses: list[str]) -> None:
    """By another thread, say: the entry would belong to another key."""
    x = np.ones((ROWS, COLUMNS), np.float32)
    run = dispatch.CacheEntry.run

    def changing(self: Any, *given: Any) -> Any:
        results = run(self, *given)
        x.shape = (COLUMNS, ROWS)
        return results

    with monkeypatch.context() as patch:
        patch.setattr(dispatch.CacheEntry, "run", changing)
        normgrad.layer_norm(x, [COLUMNS])
    assert normgrad.layer_norm.dispatch._entries == {}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_process_made_by_fork_goes_on_with_the_cache() -> None:
    code = """
import os, threading, numpy as np, normgrad
normgrad.layer_norm(np.ones((2, 1), np.float32), [1])  # imports are over before the first fork
stop = False
def work():
    while not stop:
        for columns in range(1, 40):
            normgrad.layer_norm(np.ones((2, columns), np.float32), [columns])
        normgrad.layer_norm.dispatch.clear()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
codes = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        for columns in range(1, 60):
            output, *_ = normgrad.layer_norm(np.ones((2, columns), np.float32), [columns])
            assert not output.any()
        os._exit(0)
    codes.append(os.waitpid(child, 0)[1])
stop = True
for thread in threads: thread.join()
print(set(codes))
"""
    assert run_python(code, PYTHONWARNINGS="ignore") == "{0}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="stacks are of another size there")
def test_threads_with_the_smallest_stacks() -> None:
    """Python allows 32 KiB, with which NumPy works."""
    code = """
import threading, numpy as np, normgrad
columns = 512
x, vector, count = np.ones((8, columns), np.float32), np.ones(columns, np.float32), np.array([8], np.int32)
call = lambda: normgrad.batch_norm_elemt_backward(x, x, *[vector] * 5, count)
for _ in range(3):
    call()
threading.stack_size(32768)
thread = threading.Thread(target=lambda: print(np.sort(call()).shape))
thread.start()
thread.join()
"""
    assert run_python(code) == "(8, 512)\n"


# Errors, and nothing left behind


@LIBRARIES
def test_a_refused_call_writes_and_stores_nothing(library: Library) -> None:
    args = library(_call())
    outputs = _outputs(args)
    for wrong in ((*args[:2], (COLUMNS + 1,), *args[3:]), (args[0][1:], *args[1:])):
        with pytest.raises(normgrad.ContractError):
            normgrad.layer_norm_backward(*wrong, out=outputs)
    assert all(np.isnan(np.asarray(output)).all() for output in outputs)
    assert normgrad.layer_norm_backward.dispatch._entries == {}


def test_a_kernel_that_fails_is_the_contracts_error_and_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _call()
    with monkeypatch.context() as patch:
        patch.setattr(Step, "load", lambda step: lambda descriptor: 7)
        for _ in range(2):
            with pytest.raises(normgrad.ContractError, match="returned status 7") as raised:
                normgrad.layer_norm_backward(*args)
            assert raised.value.status == 361001
            assert normgrad.layer_norm_backward.dispatch._entries == {}
    normgrad.layer_norm_backward(*args)

    def fails(self: Step, *given: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Step, "run", fails)
    with pytest.raises(normgrad.ContractError, match="the work failed: MemoryError: no room"):
        normgrad.layer_norm_backward(*args)


@LIBRARIES
def test_nothing_is_referred_to_after_a_call(library: Library) -> None:
    args = library(_cached_call())
    normgrad.layer_norm_backward(*args)
    held = [*args, None, True, (), np.dtype(np.float32), np.empty]
    before = [sys.getrefcount(thing) for thing in held]
    for _ in range(1000):
        results = normgrad.layer_norm_backward(*args)
    assert max(abs(sys.getrefcount(thing) - count) for thing, count in zip(held, before, strict=True)) < 10
    watched = [weakref.ref(thing) for thing in (*results, *args[:2], *args[3:])]
    del results, args, held
    gc.collect()
    assert [one() for one in watched] == [None] * 9
