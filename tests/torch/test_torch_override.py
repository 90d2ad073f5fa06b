"""normgrad.torch.override, by PyTorch's own samples of the operators and modules."""

from __future__ import annotations

import copy
import math
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import normgrad.torch
from normgrad.torch import overriding
from support.processes import run_python
from support.torch_databases import FLOATS, MODULES, OPERATORS, calls, modules
from support.torch_samples import random

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
F = torch.nn.functional
every_operator = pytest.mark.parametrize("name", OPERATORS)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


class Counter:
    """How many calls our kernels have served."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        for kernel in overriding._OPERATORS.values():
            monkeypatch.setattr(kernel, "dispatch", self._counting(kernel.dispatch))

    def _counting(self, function: Any) -> Any:
        def counted(*args: Any) -> Any:
            found = function(*args)
            self.calls += found is not None
            return found

        return counted


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert overriding._in_force == 0


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def cast(values: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    return torch.utils._pytree.tree_map(one, values)


def gradients(function: Any, sample: Any, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Of the first output, which is what training uses."""
    values = (sample.input, sample.args, sample.kwargs)
    input, args, kwargs = values if dtype is None else cast(values, dtype)
    output = tensors_of(function(input, *args, **kwargs))[0]
    leaves = [leaf for leaf in tensors_of((input, args, kwargs)) if leaf.requires_grad]
    grad_out = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(sample.input.dtype).to(output)
    found = torch.autograd.grad(output, leaves, grad_out, allow_unused=True)
    return [one for one in found if one is not None]


TOLERANCE = {torch.float32: 1.3e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}  # torch.testing's


def assert_as_near(found: Any, plain: Any, exact: Any, dtype: torch.dtype, allowance: float = 1e-5) -> None:
    """As near to float64 as PyTorch's own gradients, or within its tolerance; in float64 the same bits."""
    for mine, other, right in zip(found, plain, exact, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        if dtype == torch.float64:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
        elif mine.numel():
            off, theirs_off = ((one.double() - right).abs().max() for one in (mine, other))
            assert off <= theirs_off + TOLERANCE[dtype] * right.abs().max() + allowance


def rounding_of_constant_rows(sample: Any) -> float:
    """A row of one element has no variance, and what rounds in its mean is divided by the root of eps."""
    shape = sample.args[0] if sample.args else sample.kwargs.get("normalized_shape", (0,))
    if not isinstance(shape, tuple) or math.prod(shape) != 1 or sample.input.numel() == 0:
        return 1e-5
    return torch.finfo(torch.float32).eps * float(sample.input.detach().abs().max()) / 1e-5**0.5


@every_operator
@every_dtype
def test_pytorchs_own_samples(name: str, dtype: torch.dtype, counter: Counter) -> None:
    samples = list(calls(name, dtype))
    assert len(samples) > 3
    for function, sample in samples:
        plain, exact = gradients(function, sample), gradients(function, sample, torch.float64)
        with normgrad.torch.override():
            found = gradients(function, sample)
        assert_as_near(found, plain, exact, dtype, rounding_of_constant_rows(sample))
    ours_at_work = dtype != torch.float64 and "batch" not in name
    assert (counter.calls > 0) == ours_at_work


@every_operator
def test_noncontiguous_samples(name: str) -> None:
    """As PyTorch's test of that name: strides change nothing."""
    from torch.testing._internal.common_utils import noncontiguous_like

    for function, sample in calls(name, torch.float32):
        values = torch.utils._pytree.tree_map(
            lambda leaf: noncontiguous_like(leaf) if isinstance(leaf, torch.Tensor) else leaf,
            (sample.input, sample.args, sample.kwargs),
        )
        strided = type(sample)(values[0], args=values[1], kwargs=values[2])
        with normgrad.torch.override():
            torch.testing.assert_close(gradients(function, strided), gradients(function, sample), equal_nan=True)


@every_operator
@pytest.mark.usefixtures("one_thread")
def test_gradgradcheck(name: str) -> None:
    """PyTorch's numerical check of second derivatives, which is for float64, with the override on."""
    checked = 0
    for function, sample in calls(name, torch.float64):
        named = [key for key, value in sample.kwargs.items() if isinstance(value, torch.Tensor)]
        inputs = (sample.input, *sample.args, *(sample.kwargs[key] for key in named))
        bias_alone = name == "native_layer_norm" and sample.args[1] is None  # PyTorch knows that it fails there
        if not 0 < sum(leaf.numel() for leaf in tensors_of(inputs)) <= 64 or bias_alone:
            continue

        def first(*inputs: Any, function: Any = function, sample: Any = sample, named: Any = named) -> Any:
            args, given = inputs[: len(inputs) - len(named)], inputs[len(inputs) - len(named) :]
            kwargs = sample.kwargs | dict(zip(named, given, strict=True))
            return tensors_of(function(*args, **kwargs))[0]

        with normgrad.torch.override():
            assert torch.autograd.gradcheck(first, inputs)
            assert torch.autograd.gradgradcheck(first, inputs)
        checked += 1
    assert checked > 0


@pytest.mark.parametrize("name", [name for name in OPERATORS if "batch" not in name])
def test_second_derivatives_and_forward_mode_in_float32(name: str) -> None:
    """With the override on, as without it: PyTorch's formulas around our kernels."""
    for function, sample in calls(name, torch.float32):
        if not isinstance(sample.input, torch.Tensor) or sample.input.numel() == 0:
            continue

        def output(x: torch.Tensor, function: Any = function, sample: Any = sample) -> torch.Tensor:
            return tensors_of(function(x, *sample.args, **sample.kwargs))[0].sin().sum()

        def second(x: torch.Tensor, output: Any = output) -> Any:
            leaf = x.detach().clone().requires_grad_()
            (first,) = torch.autograd.grad(output(leaf), leaf, create_graph=True)
            return torch.autograd.grad(first.square().sum(), leaf)[0]

        plain = second(sample.input)
        with normgrad.torch.override():
            torch.testing.assert_close(second(sample.input), plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", MODULES)
@every_dtype
@pytest.mark.usefixtures("one_thread")
def test_pytorchs_own_modules(name: str, dtype: torch.dtype, counter: Counter) -> None:
    for sample in modules(name, dtype):
        module = getattr(torch.nn, name)(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(dtype)
        (x,) = sample.forward_input.args

        def step(module: torch.nn.Module, x: torch.Tensor) -> Any:
            leaf = x.detach().requires_grad_()
            output = module(leaf)
            grad_out = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(dtype).to(output)
            return torch.autograd.grad(output, [leaf, *module.parameters()], grad_out)

        plain, exact = step(module, x), step(copy.deepcopy(module).double(), x.double())
        with normgrad.torch.override():
            assert_as_near(step(module, x), plain, exact, dtype)
            if dtype == torch.float64 and x.numel() < 200:
                assert torch.autograd.gradgradcheck(module, (x,))
    assert (counter.calls > 0) == (dtype != torch.float64)


def one_gradient(x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(F.layer_norm(leaf, x.shape[-1:]).sin().sum(), leaf)[0]


def test_undone_to_the_last_bit(counter: Counter) -> None:
    x = random(64, 96)
    before = one_gradient(x)
    with normgrad.torch.override():
        one_gradient(x)
    served = counter.calls
    assert served > 0
    assert torch.equal(one_gradient(x), before)
    assert counter.calls == served


def test_nested_and_process_wide(counter: Counter) -> None:
    x = random(4, 8)

    def is_on() -> bool:
        before = counter.calls
        one_gradient(x)
        return counter.calls > before

    everywhere = normgrad.torch.override()
    assert is_on()
    with normgrad.torch.override() as inner:
        assert isinstance(inner, normgrad.torch.override)
        assert is_on()
    assert is_on()
    everywhere.undo()
    everywhere.undo()
    assert not is_on()
    with pytest.raises(KeyError), normgrad.torch.override():
        raise KeyError
    assert not is_on()


def test_entered_again(counter: Counter) -> None:
    x = random(4, 8)

    def is_on() -> bool:
        before = counter.calls
        one_gradient(x)
        return counter.calls > before

    again = normgrad.torch.override()
    for _ in range(3):
        with again:
            assert is_on()
            with again:
                assert is_on()
            assert is_on()
        assert not is_on()
    with again:
        again.undo()
        assert not is_on()
    assert not is_on()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_while_another_thread_enters_and_leaves() -> None:
    code = """
import os, threading, warnings
warnings.simplefilter("ignore")
import torch, normgrad.torch
from normgrad.torch import overriding
held, forked = threading.Event(), threading.Event()
def hold():
    with overriding._lock:
        held.set()
        forked.wait(1)  # a fork that waits for the lock comes after that
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    import signal
    signal.alarm(20)
    with normgrad.torch.override():
        os._exit(0)
forked.set()
thread.join()
print(os.waitpid(child, 0)[1])
"""
    assert run_python(code) == "0\n"


def test_threads_that_enter_and_leave_while_others_work() -> None:
    """The dispatcher's tables must not change under a thread inside a backward pass."""
    x = random(8, 16)
    expected, failures, stop = one_gradient(x), [], threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                torch.testing.assert_close(one_gradient(x), expected)
        except BaseException as failure:
            failures.append(failure)
            raise

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for _ in range(3000):
        with normgrad.torch.override():
            pass
    stop.set()
    for worker in workers:
        worker.join()
    assert not failures


def test_backward_pass_in_another_thread(counter: Counter) -> None:
    with normgrad.torch.override():
        worker = threading.Thread(target=one_gradient, args=(random(4, 8),))
        worker.start()
        worker.join()
    assert counter.calls == 1


@pytest.mark.parametrize("dims", [3, 4, 5])
def test_group_norm_in_every_memory_order(dims: int) -> None:
    x = random(2, 6, *[4] * (dims - 2))
    for moved in (x, x.movedim(1, -1).contiguous().movedim(-1, 1), x.transpose(1, 2).contiguous().transpose(1, 2)):

        def step(x: torch.Tensor = moved) -> Any:
            leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            return torch.autograd.grad(F.group_norm(leaf, 3).sin().sum(), leaf)[0]

        plain = step()
        with normgrad.torch.override():
            ours = step()
        assert ours.stride() == plain.stride()
        torch.testing.assert_close(ours, plain)


def test_nine_dimensions_stay_with_pytorch(counter: Counter) -> None:
    x = random(*[2] * 9)
    plain = one_gradient(x)
    with normgrad.torch.override():
        assert torch.equal(one_gradient(x), plain)
    assert counter.calls == 0


def test_fake_tensors_and_compiled_functions() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.compiler.reset()
    x = random(4, 8)
    with normgrad.torch.override():
        with FakeTensorMode():
            assert one_gradient(torch.empty(4, 8)).shape == (4, 8)
        compiled = torch.compile(lambda x: F.layer_norm(x, [8]).sin(), backend="aot_eager", fullgraph=True)
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(compiled(leaf).sum(), leaf)
    torch.testing.assert_close(found, one_gradient(x))
