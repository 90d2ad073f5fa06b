"""The dispatch cache behind torch.ops.normgrad, the modules and override(): PyTorch sees every call all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import normgrad
import normgrad.torch
from normgrad.operators import dispatch
from normgrad.testing.expected import as_tuple
from normgrad.torch.library import KERNELS
from support.processes import run_python
from support.torch_samples import copied, random, samples

ops = torch.ops.normgrad
CALLS = [(name, number) for name, calls in samples().items() for number in range(len(calls))]


@pytest.fixture(autouse=True)
def empty_caches(misses: list[str]) -> None:
    for kernel in KERNELS.values():
        kernel.dispatch.clear()


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(as_tuple(found), as_tuple(expected), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            assert one.stride() == other.stride()


@pytest.mark.parametrize(("name", "number"), CALLS)
def test_the_second_call_is_a_hit(name: str, number: int, misses: list[str]) -> None:
    args = samples()[name][number]
    expected = getattr(normgrad, name)(*copied(args))
    del misses[:]
    for _ in range(3):
        assert_equal(getattr(ops, name)(*copied(args)), expected)
    assert misses == [name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_small_and_large_strided_and_not(dtype: torch.dtype, misses: list[str]) -> None:
    for shape in ((2, 8), (64, 768), (300, 40, 5)):
        for strided in (False, True):
            x = random(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2] if strided else random(*shape, dtype=dtype)
            args = (x, [shape[-1]], random(shape[-1], dtype=dtype), None, 1e-5)
            expected = normgrad.layer_norm(*args)
            del misses[:]
            for _ in range(2):
                assert_equal(ops.layer_norm(*args), expected)
            assert misses == ["layer_norm"]


def cached_call() -> tuple[torch.Tensor, list[int]]:
    args = (random(4, 8), [8])
    for call in (ops.layer_norm, normgrad.layer_norm):
        for _ in range(2):
            call(*args)
    return args


def test_lists_and_tuples_and_sizes_are_one_layout(misses: list[str]) -> None:
    x, _ = cached_call()
    del misses[:]
    for shape in ([8], (8,), x.shape[1:]):
        ops.layer_norm(x, shape)
        normgrad.layer_norm(x, shape)
    assert misses == []


def test_a_parameter_is_a_tensor(misses: list[str]) -> None:
    x, shape = cached_call()
    weight = random(8)
    for one in (weight, torch.nn.Parameter(weight), weight.clone().requires_grad_()):
        normgrad.layer_norm(x, shape, one)
    assert misses == ["layer_norm"] * 3  # two of the cached call, one of the weight


def test_one_tensor_for_several_arguments(misses: list[str]) -> None:
    x, mean, rstd = random(4, 8), random(4, 1), random(4, 1).abs()
    for call in (normgrad.layer_norm_backward, ops.layer_norm_backward):
        del misses[:]
        expected = call(x, x.clone(), [8], mean, rstd)
        assert_equal(call(x, x, [8], mean, rstd), expected)
        assert misses == ["layer_norm_backward"]


def test_two_alignments_of_a_16_bit_tensor() -> None:
    memory = torch.zeros(4 * 8 * 4 + 2, dtype=torch.uint8)
    for start in (0, 2, 0, 2):
        x = memory[start : start + 128].view(torch.float16).reshape(8, 8)
        x.copy_(random(8, 8))
        assert_equal(ops.layer_norm(x, [8]), normgrad.layer_norm(x.clone(), [8]))


# Autograd


def test_a_leaf_is_differentiated_and_under_no_grad_it_is_not() -> None:
    x, shape = cached_call()
    leaf = x.clone().requires_grad_()
    for _ in range(2):
        output, *_ = ops.layer_norm(leaf, shape)
        assert output.grad_fn is not None
    with torch.no_grad():
        for _ in range(2):
            output, *_ = ops.layer_norm(leaf, shape)
            assert not output.requires_grad
    output, *_ = ops.layer_norm(leaf, shape)  # though a call on a leaf is in the cache now
    assert output.grad_fn is not None
    parameter = torch.nn.Parameter(random(8))
    assert ops.layer_norm(x, shape, parameter)[0].grad_fn is not None


def test_inference_mode() -> None:
    x, shape = cached_call()
    expected = ops.layer_norm(x, shape)
    with torch.inference_mode():
        for _ in range(2):
            results = ops.layer_norm(x, shape)
            assert all(result.is_inference() for result in results)
            assert_equal(results, expected)
    assert not any(result.is_inference() for result in ops.layer_norm(x, shape))


# Modes, transforms and subclasses see every call


def layer_norm_module(x: torch.Tensor) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normgrad.torch.heuristics.MIN_FLOAT32", 0)
        patch.setattr("normgrad.torch.heuristics.takes_layer_norm_forward", lambda *_: True)
        found: torch.Tensor = normgrad.torch.LayerNorm(8, elementwise_affine=False)(x)
    return found


SEEN = pytest.mark.parametrize(
    "function", [lambda x: ops.layer_norm(x, [8])[0], layer_norm_module], ids=["operator", "module"]
)


@SEEN
@pytest.mark.parametrize("calls_before", [0, 3])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_a_cached_call(function: Any, mode: str, calls_before: int) -> None:
    for _ in range(calls_before):
        function(random(4, 8))
    traced = make_fx(function, tracing_mode=mode)(random(4, 8))
    assert "normgrad.layer_norm" in traced.code
    other = random(4, 8, seed=7)
    torch.testing.assert_close(traced(other), function(other), rtol=0, atol=0)


@SEEN
@pytest.mark.parametrize("calls_before", [0, 3])
def test_fake_tensors_stay_fake(function: Any, calls_before: int) -> None:
    x = random(4, 8)
    for _ in range(calls_before):
        function(x)
    with FakeTensorMode() as mode:
        assert isinstance(function(mode.from_tensor(x)), FakeTensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(function(x), FakeTensor)


@pytest.mark.parametrize("calls_before", [0, 3])
def test_a_plain_call_that_cannot_allocate_says_so(calls_before: int) -> None:
    """A plain call is no operator of PyTorch's: under a mode that fakes allocations it has nothing to write to."""
    x, shape = random(4, 8), [8]
    for _ in range(calls_before):
        normgrad.layer_norm(x, shape)
    with FakeTensorMode(), pytest.raises(normgrad.ContractError, match="without memory"):
        normgrad.layer_norm(x, shape)
    with pytest.raises(normgrad.ContractError, match="without memory"):
        torch.func.grad(lambda y: normgrad.layer_norm(x, shape)[0].sum() * y)(torch.tensor(1.0))
    normgrad.layer_norm(x, shape)


@SEEN
def test_modes_see_the_call(function: Any) -> None:
    x, _ = cached_call()
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for mode in (Functions, Dispatch):
        for _ in range(2):
            del seen[:]
            with mode():
                function(x)
            assert [name for name in seen if "normgrad" in name and "layer_norm" in name], mode


def test_the_profiler_sees_the_call() -> None:
    x, shape = cached_call()
    with torch.profiler.profile() as profile:
        ops.layer_norm(x, shape)
    assert "normgrad::layer_norm" in {event.name for event in profile.events()}


def test_no_class_of_pytorchs_is_replaced() -> None:
    assert all(type(getattr(ops, name)) is torch._ops.OpOverloadPacket for name in KERNELS)


def test_a_subclass_sees_the_call() -> None:
    x, shape = cached_call()
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


def test_transforms_are_no_cached_calls() -> None:
    x, shape = cached_call()
    expected = ops.layer_norm(x, shape)[0]
    batched = torch.vmap(lambda row: ops.layer_norm(row, shape)[0])(x)
    torch.testing.assert_close(batched, expected)
    gradient = torch.func.grad(lambda data: ops.layer_norm(data, shape)[0].sin().sum())(x)
    assert gradient.abs().sum() > 0
    _, tangent = torch.func.jvp(lambda data: ops.layer_norm(data, shape)[0], (x,), (torch.ones_like(x),))
    assert tangent.shape == x.shape
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(ops.layer_norm(dual, shape)[0]).tangent is not None


# Tensors that are more or less than memory


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": torch.Tensor.to_sparse,
    "meta": lambda x: x.to("meta"),
    "zero": lambda x: torch._efficientzerotensor(x.shape),
    "functional": torch._to_functional_tensor,
    "float64": torch.Tensor.double,
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_tensor_is_refused_after_plain_ones(kind: str) -> None:
    x, shape = cached_call()
    odd = ODD[kind](x.clone())
    for _ in range(2):
        with pytest.raises(normgrad.ContractError):
            normgrad.layer_norm(odd, shape)
    assert_equal(normgrad.layer_norm(x, shape), ops.layer_norm(x, shape))


def test_a_negated_tensor_is_read_as_negated(misses: list[str]) -> None:
    args = samples()["layer_norm_backward"][0]
    for call in (normgrad.layer_norm_backward, ops.layer_norm_backward):
        expected = call(args[0].neg(), *args[1:])
        for _ in range(3):
            assert_equal(call(torch._neg_view(args[0]), *args[1:]), expected)
        assert_equal(call(args[0].neg(), *args[1:]), expected)


@pytest.mark.parametrize("call", ["normgrad.layer_norm", "torch.ops.normgrad.layer_norm"])
def test_a_nested_tensor_is_refused_after_plain_ones(call: str) -> None:
    code = f"""
import torch, normgrad, normgrad.torch, warnings
warnings.simplefilter("ignore")
call = {call}
for _ in range(3):
    call(torch.ones(4, 8), [8])
nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
for _ in range(2):
    try:
        call(nested, [8])
    except (normgrad.ContractError, NotImplementedError) as error:
        print("refused")
call(torch.ones(4, 8), [8])
"""
    assert run_python(code) == "refused\n" * 2


def test_nested_tensors_under_override_are_pytorchs() -> None:
    code = """
import torch, normgrad.torch, warnings
warnings.simplefilter("ignore")
norm = torch.nn.LayerNorm(8)

def gradients(*rows):
    torch.manual_seed(0)
    parts = [torch.randn(count, 8) for count in rows]
    x = (parts[0] if len(parts) == 1 else torch.nested.nested_tensor(parts)).requires_grad_()
    output = norm(x)
    norm.zero_grad()
    (output if len(parts) == 1 else output.to_padded_tensor(0.0)).pow(3).sum().backward()
    return norm.weight.grad.clone(), norm.bias.grad.clone()

expected = gradients(2, 3)
with normgrad.torch.override():
    for _ in range(3):
        gradients(5)
    for _ in range(3):
        print(all(map(torch.equal, gradients(2, 3), expected)))
"""
    assert run_python(code) == "True\n" * 3


def test_a_tensor_beyond_its_storage_is_refused() -> None:
    x, shape = cached_call()
    for nbytes in (8, 0):
        for call in (normgrad.layer_norm, ops.layer_norm):
            shrunk = x.clone()
            shrunk.untyped_storage().resize_(nbytes)
            with pytest.raises(normgrad.ContractError, match=r"reaches outside its storage|has no memory"):
                call(shrunk, shape)


# Errors, threads, bounds


def test_errors_are_those_of_the_first_call() -> None:
    x, shape = cached_call()

    def said(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
        with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
            call()
        return type(raised.value), str(raised.value)

    for args in ((x, [4]), (x, [8.0]), (x, ["8"]), (x, None), (x, shape, None, None, "eps"), (x,), (x, shape, x)):
        assert said(lambda args=args: ops.layer_norm(*args)) == said(lambda args=args: ops.layer_norm.default(*args))


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


def test_a_kernel_that_fails_is_the_contracts_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from normgrad.cpu.prepare.launch import Step

    def fails(self: Step, *given: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Step, "run", fails)
    for _ in range(2):
        with pytest.raises(normgrad.ContractError, match="the work failed: MemoryError: no room") as raised:
            ops.layer_norm(*samples()["layer_norm"][0])
        assert raised.value.status == 361001


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_ENTRIES", 4)
    for columns in range(1, 12):
        ops.layer_norm(random(2, columns), [columns])
    assert len(KERNELS["layer_norm"].dispatch._entries) == 4
