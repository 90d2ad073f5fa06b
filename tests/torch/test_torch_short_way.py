"""Calls of torch.ops.normgrad that pass PyTorch's dispatcher by: the same results, and only where nothing is missed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import normgrad
import normgrad.torch
from normgrad.operators import gathering
from normgrad.torch.library import KERNELS
from support.torch_samples import random, samples

ops = torch.ops.normgrad
CALLS = [(name, number) for name, calls in samples().items() for number in range(len(calls))]


@pytest.fixture(autouse=True)
def nothing_is_known() -> None:
    for kernel in KERNELS.values():
        kernel._calls.recipes.forget()


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose calls go through the dispatcher, as they do."""
    found: list[str] = []
    call = torch._ops.OpOverloadPacket.__call__

    def noted(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        found.append(self.__name__)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torch._ops.OpOverloadPacket, "__call__", noted)
    return found


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(as_tuple(found), as_tuple(expected), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            assert one.stride() == other.stride()


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)


@pytest.mark.parametrize(("name", "number"), CALLS)
def test_the_second_call_passes_the_dispatcher_by(name: str, number: int, dispatched: list[str]) -> None:
    args = samples()[name][number]
    expected = getattr(ops, name).default(*copied(args))
    for kernel in KERNELS.values():
        kernel._calls.recipes.forget()
    for calls in range(3):
        assert_equal(getattr(ops, name)(*copied(args)), expected)
        assert dispatched == [name], calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_small_and_large_strided_and_not(dtype: torch.dtype, dispatched: list[str]) -> None:
    for shape in ((2, 8), (64, 768), (300, 40, 5)):
        for strided in (False, True):
            x = random(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2] if strided else random(*shape, dtype=dtype)
            args = (x, [shape[-1]], random(shape[-1], dtype=dtype), None, 1e-5)
            assert_equal(ops.layer_norm(*args), normgrad.layer_norm(*args))
            del dispatched[:]
            assert_equal(ops.layer_norm(*args), normgrad.layer_norm(*args))
            assert dispatched == []


def known_call() -> tuple[torch.Tensor, list[int]]:
    args = (random(4, 8), [8])
    for _ in range(2):
        ops.layer_norm(*args)
    return args


def test_a_leaf_is_differentiated_and_under_no_grad_it_is_not(dispatched: list[str]) -> None:
    x, shape = known_call()
    leaf = x.clone().requires_grad_()
    for _ in range(2):
        output, *_ = ops.layer_norm(leaf, shape)
        assert output.grad_fn is not None
    with torch.no_grad():
        ops.layer_norm(leaf, shape)
        del dispatched[:]
        output, *_ = ops.layer_norm(leaf, shape)
        assert not output.requires_grad
        assert dispatched == []
    output, *_ = ops.layer_norm(leaf, shape)  # though a call on a leaf has now left a recipe
    assert output.grad_fn is not None
    parameter = torch.nn.Parameter(random(8))
    assert ops.layer_norm(x, shape, parameter)[0].grad_fn is not None


def test_modes_see_the_call() -> None:
    x, shape = known_call()
    seen: list[Any] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for mode in (Functions, Dispatch):
        for _ in range(2):
            del seen[:]
            with mode():
                ops.layer_norm(x, shape)
            assert [str(func) for func in seen if "layer_norm" in str(func)], mode
    with torch.profiler.profile() as profile:
        ops.layer_norm(x, shape)
    assert "normgrad::layer_norm" in {event.name for event in profile.events()}


def test_a_subclass_sees_the_call() -> None:
    x, shape = known_call()
    seen: list[Any] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    for _ in range(2):
        del seen[:]
        output, *_ = ops.layer_norm(x.as_subclass(Watched), shape)
        assert seen
        assert type(output) is Watched
        torch.testing.assert_close(output.as_subclass(torch.Tensor), ops.layer_norm(x, shape)[0], rtol=0, atol=0)


def test_transforms_and_fake_tensors_are_not_known_calls() -> None:
    x, shape = known_call()
    expected = ops.layer_norm(x, shape)[0]
    batched = torch.vmap(lambda row: ops.layer_norm(row, shape)[0])(x)
    torch.testing.assert_close(batched, expected)
    gradient = torch.func.grad(lambda data: ops.layer_norm(data, shape)[0].sin().sum())(x)
    assert gradient.abs().sum() > 0
    _, tangent = torch.func.jvp(lambda data: ops.layer_norm(data, shape)[0], (x,), (torch.ones_like(x),))
    assert tangent.shape == x.shape
    with torch._subclasses.FakeTensorMode() as mode:
        fake, *_ = ops.layer_norm(mode.from_tensor(x), shape)
        assert isinstance(fake, torch._subclasses.FakeTensor)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(ops.layer_norm(dual, shape)[0]).tangent is not None


def test_errors_are_those_of_the_long_way() -> None:
    x, shape = known_call()

    def said(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
        with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
            call()
        return type(raised.value), str(raised.value)

    for args in ((x, [4]), (x, [8.0]), (x, ["8"]), (x, None), (x, shape, None, None, "eps"), (x,), (x, shape, x)):
        assert said(lambda args=args: ops.layer_norm(*args)) == said(lambda args=args: ops.layer_norm.default(*args))


def test_lists_and_tuples_and_sizes_are_one_layout(dispatched: list[str]) -> None:
    x, _ = known_call()
    del dispatched[:]
    for shape in ([8], (8,), x.shape[1:]):
        ops.layer_norm(x, shape)
    assert dispatched == []
    args = samples()["layer_norm_backward"][0][:-1]
    for mask in ([True, False, True], (True, False, True), [True, True, True]):
        expected = normgrad.layer_norm_backward(*args, mask)
        for _ in range(2):
            assert_equal(ops.layer_norm_backward(*args, mask), expected)
    assert_equal(ops.layer_norm_backward(*args), expected)
    assert dispatched == ["layer_norm_backward"] * 2


def test_threads_get_what_each_asked_for() -> None:
    inputs = [random(4, 8, seed=seed) for seed in range(4)]
    expected = [normgrad.layer_norm(x, [8])[0] for x in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        found = [ops.layer_norm(inputs[number], [8])[0] for _ in range(500)]
        wrong.extend(number for one in found if not torch.equal(one, expected[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def recipes() -> list[Any]:
    cases = set(KERNELS["layer_norm"]._calls.recipes._cases.values())
    return [recipe for case in cases for same in case.recipes.values() for recipe in same]


def test_without_native_code_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    args = samples()["layer_norm"][0]
    expected = [ops.layer_norm(*args) for _ in range(2)][1]
    register = KERNELS["layer_norm"]._calls.registers[None]
    assert len(register._tables) == 1
    KERNELS["layer_norm"]._calls.recipes.forget()
    monkeypatch.setattr(gathering, "_functions", lambda: (None, None))
    for _ in range(3):
        assert_equal(ops.layer_norm(*args), expected)
    assert register._tables == []
    args[0].untyped_storage().resize_(8)
    with pytest.raises(normgrad.ContractError, match="reaches outside its storage"):
        ops.layer_norm(*args)


def test_an_address_within_an_element_is_another_recipe() -> None:
    memory = torch.zeros(4 * 8 * 4 + 2, dtype=torch.uint8)
    for start in (0, 2, 0, 2):
        x = memory[start : start + 128].view(torch.float16).reshape(8, 8)
        x.copy_(random(8, 8))
        assert_equal(ops.layer_norm(x, [8]), normgrad.layer_norm(x.clone(), [8]))


def test_the_work_fails_with_the_contracts_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from normgrad.cpu.steps import Step

    def fails(self: Step, descriptor: Any, address: int) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Step, "call", fails)
    for _ in range(2):
        with pytest.raises(normgrad.ContractError, match="the work failed: MemoryError: no room") as raised:
            ops.layer_norm(*samples()["layer_norm"][0])
        assert raised.value.status == 361001


def test_the_kept_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normgrad.operators.recollection._MOST_KEYS", 4)
    for columns in range(1, 12):
        ops.layer_norm(random(2, columns), [columns])
    assert 1 <= len(recipes()) <= 4
