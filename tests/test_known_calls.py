"""Calls that native code recognises and finishes: the same bits, the same refusals, and nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normgrad
from normgrad.contract import arrays
from normgrad.cpu.steps import Step
from normgrad.operators import OPERATORS, objects, register
from normgrad.operators.calls import Calls
from support.recipes import RECIPES, valid_calls

ROWS, COLUMNS = 4, 6


@pytest.fixture(autouse=True)
def not_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators whose calls are not known, as they come. All have forgotten what they knew before."""
    found: list[str] = []
    original = Calls.not_registered

    def counted(self: Calls, *args: Any) -> Any:
        found.append(self._signature.name)
        return original(self, *args)

    monkeypatch.setattr(Calls, "not_registered", counted)
    for operator in OPERATORS.values():
        operator._calls.recipes.forget()
    yield found
    for operator in OPERATORS.values():
        operator._calls.recipes.forget()


def _call(shape: tuple[int, int] = (ROWS, COLUMNS), dtype: Any = np.float32, seed: int = 0) -> tuple[Any, ...]:
    """The arguments of a LayerNorm's backward pass."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    data = rng.standard_normal((2, *shape), np.float32).astype(dtype)
    statistics = rng.uniform(0.5, 1.5, (2, rows, 1)).astype(np.float32)
    vectors = rng.standard_normal((2, columns), np.float32).astype(dtype)
    return (*map(np.array, data), (columns,), *map(np.array, statistics), *map(np.array, vectors))


def _known_call(**more: Any) -> tuple[Any, ...]:
    for _ in range(2):
        normgrad.layer_norm_backward(*_call(**more))
    return _call(**more)


def _same_bits(found: Any, expected: Any) -> bool:
    return all(
        (one is None and other is None) or np.asarray(one).tobytes() == np.asarray(other).tobytes()
        for one, other in zip(found, expected, strict=True)
    )


def _tensors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in args)


# The same results


@pytest.mark.parametrize("operator", RECIPES)
def test_a_call_gives_the_same_bits_again(operator: str, backend: str, not_known: list[str]) -> None:
    """Finished in native code, or with a backend whose kernels need Python."""
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
    # Arrays and tensors at once are not known, nor is what shares memory in part.
    assert len(not_known) < 2 * calls


def _bits(result: Any) -> bytes:
    if result is None:
        return b""
    if isinstance(result, torch.Tensor):
        result = result.double().numpy()  # NumPy has no bfloat16 for it; NaN stays NaN
    return result.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(2, 2), (16, 64), (128, 768), (333, 777), (512, 1024)])
def test_small_and_large(shape: tuple[int, int], dtype: Any, not_known: list[str]) -> None:
    """On the stack, with a workspace from the backend, and on several threads."""
    for seed in range(3):
        args = _call(shape, dtype, seed)
        found = normgrad.layer_norm_backward(*args)
        assert len(not_known) == 1
        outputs = tuple(map(np.empty_like, found))
        normgrad.layer_norm_backward.plan(*args, out=outputs).run()
        assert _same_bits(found, outputs)
        assert [(one.dtype, one.shape, one.flags.c_contiguous) for one in found] == [
            (one.dtype, one.shape, True) for one in outputs
        ]


def test_arguments_by_name_and_by_default(not_known: list[str]) -> None:
    grad_out, x, shape, mean, rstd, weight, bias = _known_call()
    del not_known[:]
    expected = normgrad.layer_norm_backward(grad_out, x, shape, mean, rstd, weight, bias, (True, True, True))
    others = (
        normgrad.layer_norm_backward(grad_out, x, list(shape), mean, rstd, weight, bias, [True, True, True]),
        normgrad.layer_norm_backward(grad_out, x, torch.Size(shape), mean, rstd, weight, bias=bias),
        normgrad.layer_norm_backward(
            bias=bias, weight=weight, rstd=rstd, mean=mean, normalized_shape=shape, input=x, grad_out=grad_out
        ),
    )
    assert all(_same_bits(other, expected) for other in others)
    assert not_known == []
    without_bias = normgrad.layer_norm_backward(grad_out, x, shape, mean, rstd, weight)
    assert not_known == ["layer_norm_backward"]
    assert _same_bits(without_bias, expected)


def test_a_part_of_an_array_wherever_it_lies(not_known: list[str]) -> None:
    _, *rest = _call()
    whole = np.random.default_rng(1).standard_normal((10, ROWS, COLUMNS), np.float32)
    for part in whole:
        expected = normgrad.layer_norm_backward(part.copy(), *rest)
        assert _same_bits(normgrad.layer_norm_backward(part, *rest), expected)
    assert len(not_known) == 1


def test_as_many_layouts_as_a_network_has(not_known: list[str]) -> None:
    calls = [_tensors(_call((3, columns))) for columns in range(1, 61)]
    for _ in range(3):
        for args in calls:
            normgrad.layer_norm_backward(*args)
    assert len(not_known) == len(calls)


def test_more_layouts_than_are_known(monkeypatch: pytest.MonkeyPatch, not_known: list[str]) -> None:
    monkeypatch.setitem(normgrad.layer_norm_backward._calls.registers, None, register.Register(8))
    for _ in range(3):
        for columns in range(1, 13):
            args = _call((3, columns))
            assert _same_bits(normgrad.layer_norm_backward(*args), normgrad.layer_norm_backward(*_tensors(args)))
    assert len(not_known) == 24 + 2 * (24 - 8)


def test_guards_of_other_layouts_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes longer than all that native code looks at."""
    from torch._C._dynamo import guards

    asked: list[int] = []
    theirs = guards.TensorGuards

    class Counting:
        def __init__(self, *tensors: Any, **more: Any) -> None:
            self._guards = theirs(*tensors, **more)

        def check(self, *tensors: Any) -> bool:
            asked.append(len(tensors))
            return self._guards.check(*tensors)

    monkeypatch.setattr(guards, "TensorGuards", Counting)
    tensors = [torch.randn(shape) for shape in ((2, 3, 4), (2, 4, 3), (3, 4, 2), (2, 3, 4, 1))]
    tensors += [torch.randn(2, 4, 3).transpose(1, 2), torch.randn(2, 3, 8)[..., ::2]]
    for _ in range(3):
        for x in tensors:
            mean, _ = normgrad.batch_norm_stats(x)
            torch.testing.assert_close(mean, x.mean([axis for axis in range(x.dim()) if axis != 1]))
    for x in tensors:
        del asked[:]
        normgrad.batch_norm_stats(x)
        assert asked == [1]


def test_without_native_code(monkeypatch: pytest.MonkeyPatch, not_known: list[str]) -> None:
    args = _known_call()
    expected = normgrad.layer_norm_backward(*args)
    normgrad.layer_norm_backward._calls.recipes.forget()
    monkeypatch.setattr(register, "code", lambda: None)
    del not_known[:]
    for _ in range(3):
        assert _same_bits(normgrad.layer_norm_backward(*args), expected)
    assert len(not_known) == 3


def test_threads_get_what_each_asked_for() -> None:
    calls = [_call(seed=seed) for seed in range(4)]
    expected = [normgrad.layer_norm_backward(*args) for args in calls]
    wrong: list[int] = []

    def work(number: int) -> None:
        found = [normgrad.layer_norm_backward(*calls[number]) for _ in range(1000)]
        wrong.extend(number for one in found if not _same_bits(one, expected[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_layouts_that_many_threads_bring_at_once() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for columns in range(1, 41):
            args = _call((2, columns), seed=number)
            found = [normgrad.layer_norm_backward(*args) for _ in range(3)]
            wrong.extend(columns for one in found[1:] if not _same_bits(one, found[0]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# What is not the same is not known


def _swapped(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder())


@pytest.mark.parametrize(
    "changed",
    [_swapped, lambda x: x.astype(object), lambda x: x.astype(np.float64), lambda x: x[:-1]],
    ids=["swapped", "objects", "float64", "shorter"],
)
@pytest.mark.parametrize("place", [0, 1, 3, 5])
def test_what_is_wrong_is_refused_after_what_is_right(changed: Any, place: int) -> None:
    args = list(_known_call())
    args[place] = changed(args[place])
    with pytest.raises(normgrad.ContractError) as raised:
        normgrad.layer_norm_backward(*args)
    assert raised.value.status == 161002


@pytest.mark.parametrize("shape", [(COLUMNS, 2**70), (-(2**64) + COLUMNS,), (6.0,), ("6",), [[6]], None, "6"])
def test_a_number_that_is_none(shape: Any) -> None:
    args = _known_call()
    with pytest.raises(normgrad.ContractError):
        normgrad.layer_norm_backward(*args[:2], shape, *args[3:])


def test_one_is_not_true(not_known: list[str]) -> None:
    for _ in range(2):
        normgrad.layer_norm(np.ones((3, 1), np.float32), (1,), eps=1)
    del not_known[:]
    normgrad.layer_norm(np.ones((3, 1), np.float32), (1,), eps=1.0)
    normgrad.layer_norm(np.ones((3, 1), np.float32), (True,), eps=1)
    assert not_known == ["layer_norm"] * 2


def test_subclasses_are_not_known(not_known: list[str]) -> None:
    args = _known_call()
    expected = normgrad.layer_norm_backward(*args)
    del not_known[:]
    for kind in (np.recarray, np.matrix, np.ma.MaskedArray):
        assert _same_bits(normgrad.layer_norm_backward(args[0].view(kind), *args[1:]), expected)
    assert len(not_known) == 3


def test_outputs_are_none_of_the_arguments_by_position() -> None:
    args = (*_known_call(), (True, True, True))
    outputs = tuple(np.empty_like(args[place]) for place in (1, 5, 5))
    for _ in range(2):
        normgrad.layer_norm_backward(*args, out=outputs)
    with pytest.raises(TypeError):
        normgrad.layer_norm_backward(*args, *outputs)


def test_an_array_whose_memory_shrank_is_refused() -> None:
    args = _known_call()
    owner = np.zeros(ROWS * COLUMNS, np.float32)
    part = owner.reshape(ROWS, COLUMNS)
    normgrad.layer_norm_backward(part, *args[1:])
    owner.resize(2, refcheck=False)
    with pytest.raises(normgrad.ContractError, match="outside its storage"):
        normgrad.layer_norm_backward(part, *args[1:])


def test_a_misaligned_array_is_refused() -> None:
    args = _known_call()
    crooked = np.ndarray((ROWS, COLUMNS), np.float32, np.zeros(4 * ROWS * COLUMNS + 4, np.uint8), 2)
    with pytest.raises(normgrad.ContractError, match="must be aligned"):
        normgrad.layer_norm_backward(crooked, *args[1:])


def test_another_backend_and_a_product_are_asked(monkeypatch: pytest.MonkeyPatch, not_known: list[str]) -> None:
    args = _known_call()
    del not_known[:]
    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    normgrad.layer_norm_backward(*args)
    assert not_known == ["layer_norm_backward"]
    with normgrad.use_product("Atlas 200I/500 A2"), pytest.raises(normgrad.ContractError) as raised:
        normgrad.layer_norm_backward(*args)
    assert raised.value.status == 561003
    monkeypatch.delenv("NORMGRAD_BACKEND")
    del not_known[:]
    normgrad.layer_norm_backward(*args)
    assert not_known == []


def test_a_product_has_known_calls_of_its_own(not_known: list[str]) -> None:
    args = _tensors(_known_call())
    expected = normgrad.layer_norm_backward(*args)
    with normgrad.use_product("Atlas A2"):
        del not_known[:]
        results = [normgrad.layer_norm_backward(*args) for _ in range(3)]
    assert not_known == ["layer_norm_backward"]
    assert all(_same_bits(result, expected) for result in results)
    with normgrad.use_product("Atlas 200I/500 A2"), pytest.raises(normgrad.ContractError):
        normgrad.layer_norm_backward(*args)


# Nothing is left behind


def test_nothing_is_held_after_a_call() -> None:
    for args in (_known_call(), _tensors(_known_call())):
        normgrad.layer_norm_backward(*args)
        held = [*args, None, True, (), np.dtype(np.float32), np.empty]
        before = [sys.getrefcount(thing) for thing in held]
        for _ in range(1000):
            results = normgrad.layer_norm_backward(*args)
        assert max(abs(sys.getrefcount(thing) - count) for thing, count in zip(held, before, strict=True)) < 10
        last = [weakref.ref(result) for result in results]
        del results
        gc.collect()
        assert [one() for one in last] == [None] * 3


def test_a_status_of_the_kernel_is_the_contracts_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gives_up = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lambda descriptor: 7)
    address = ctypes.cast(gives_up, ctypes.c_void_p).value
    monkeypatch.setattr(Step, "alone", property(lambda step: address))
    args = _call()
    normgrad.layer_norm_backward(*args)
    for _ in range(3):
        with pytest.raises(normgrad.ContractError, match="gave up with status 7") as raised:
            normgrad.layer_norm_backward(*args)
        assert raised.value.status == 361001


@pytest.mark.parametrize("fails", [False, True])
def test_making_a_result_may_do_anything(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the very recipe, call the operator itself, or fail."""
    recipes = normgrad.layer_norm_backward._calls.recipes
    made = arrays._NumpyKind.maker
    nested = False

    def maker(self: Any, shape: Any, dtype: Any, like: Any) -> Any:
        make = made(self, shape, dtype, like)

        def makes() -> Any:
            nonlocal nested
            if recipes.registers[None]._tables and not nested:
                nested = True
                normgrad.layer_norm_backward(*_call())
                recipes.forget()
                gc.collect()
                nested = False
                if fails:
                    raise MemoryError("no room")
            return make()

        return makes

    monkeypatch.setattr(arrays._NumpyKind, "maker", maker)
    args = _call()
    expected = normgrad.layer_norm_backward(*args)
    for _ in range(4):
        if fails:
            with pytest.raises(MemoryError, match="no room"):
                normgrad.layer_norm_backward(*args)
            normgrad.layer_norm_backward(*args)
        else:
            assert _same_bits(normgrad.layer_norm_backward(*args), expected)


# Where objects keep what they hold


def test_objects_are_looked_at_before_anything_counts_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert objects.are_known()
    for name in ("TYPE", "SIZE", "REAL", "BYTES", "DATA", "DIMENSIONS", "BASE", "DTYPE"):
        with monkeypatch.context() as changed:
            changed.setattr(objects, name, getattr(objects, name) + 8)
            assert not objects.are_known(), name
