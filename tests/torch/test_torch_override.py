"""normgrad.torch.override, by PyTorch's own samples of the operators and modules."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import normgrad.torch
from normgrad.torch import aten_override, heuristics
from support.processes import run_python
from support.torch_databases import FLOATS, MODULES, OPERATORS, calls, modules
from support.torch_samples import random

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
F = torch.nn.functional
every_operator = pytest.mark.parametrize("name", OPERATORS)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.fixture(autouse=True)
def small(small_tensors_are_ours: None) -> None:
    pass


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert aten_override._in_force == ()


def taken(override: normgrad.torch.override) -> int:
    return sum(override.report().taken.values())


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def cast(values: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    return torch.utils._pytree.tree_map(one, values)


def results(function: Any, sample: Any, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The first output, which is what training uses, and its gradients."""
    values = (sample.input, sample.args, sample.kwargs)
    input, args, kwargs = values if dtype is None else cast(values, dtype)
    output = tensors_of(function(input, *args, **kwargs))[0]
    leaves = [leaf for leaf in tensors_of((input, args, kwargs)) if leaf.requires_grad]
    grad_out = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(sample.input.dtype).to(output)
    found = torch.autograd.grad(output, leaves, grad_out, allow_unused=True)
    return [output.detach(), *(one for one in found if one is not None)]


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
def test_pytorchs_own_samples(name: str, dtype: torch.dtype) -> None:
    samples = list(calls(name, dtype))
    assert len(samples) > 3
    served = 0
    for function, sample in samples:
        plain, exact = results(function, sample), results(function, sample, torch.float64)
        with normgrad.torch.override() as override:
            found = results(function, sample)
        served += taken(override)
        assert_as_near(found, plain, exact, dtype, rounding_of_constant_rows(sample))
    assert (served > 0) == (dtype != torch.float64 and name in ("nn.functional.layer_norm", "nn.functional.group_norm"))


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
            torch.testing.assert_close(results(function, strided), results(function, sample), equal_nan=True)


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
def test_pytorchs_own_modules(name: str, dtype: torch.dtype) -> None:
    served = 0
    for sample in modules(name, dtype):
        module = getattr(torch.nn, name)(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(dtype)
        (x,) = sample.forward_input.args

        def step(module: torch.nn.Module, x: torch.Tensor) -> Any:
            leaf = x.detach().requires_grad_()
            output = module(leaf)
            grad_out = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(dtype).to(output)
            return output.detach(), *torch.autograd.grad(output, [leaf, *module.parameters()], grad_out)

        plain, exact = step(module, x), step(copy.deepcopy(module).double(), x.double())
        with normgrad.torch.override() as override:
            assert_as_near(step(module, x), plain, exact, dtype)
            if dtype == torch.float64 and x.numel() < 200:
                assert torch.autograd.gradgradcheck(module, (x,))
        served += taken(override)
    assert (served > 0) == (dtype != torch.float64)


def one_gradient(x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(F.layer_norm(leaf, x.shape[-1:]).sin().sum(), leaf)[0]


def is_on() -> bool:
    return "Normgrad" in type(F.layer_norm(random(4, 8).requires_grad_(), [8]).grad_fn).__name__


def test_undone_to_the_last_bit() -> None:
    x = random(64, 96)
    before = one_gradient(x)
    with normgrad.torch.override() as override:
        one_gradient(x)
    assert taken(override) == 1
    assert torch.equal(one_gradient(x), before)
    assert taken(override) == 1


def test_nested_and_process_wide() -> None:
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


def test_entered_again() -> None:
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
from normgrad.torch import aten_override
held, forked = threading.Event(), threading.Event()
def hold():
    with aten_override._lock:
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


def test_another_thread() -> None:
    with normgrad.torch.override() as override:
        worker = threading.Thread(target=one_gradient, args=(random(4, 8),))
        worker.start()
        worker.join()
    assert taken(override) == 1


def test_calls_of_many_threads_are_all_counted() -> None:
    x = random(2, 3)

    def work() -> None:
        for _ in range(500):
            F.layer_norm(x, [3])

    threads = [threading.Thread(target=work) for _ in range(4)]
    with normgrad.torch.override() as override:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert override.report().taken == {"layer_norm": 2000}


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


@pytest.mark.parametrize("order", ["contiguous", "channels_last", "transposed"])
def test_small_group_norms_have_pytorchs_bits(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel takes contiguous tensors alone, and its backward pass does not look at a weight's strides."""
    monkeypatch.setattr(heuristics, "MIN_FLOAT32", 1 << 20)
    monkeypatch.setattr(heuristics, "MIN_FLOAT32_CHANNELS_LAST", 1 << 20)
    x = random(2, 6, 4, 5)
    if order == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif order == "transposed":
        x = x.transpose(2, 3)

    def step() -> Any:
        leaves = [x.clone(), random(12)[::2], random(1).expand(6)]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        output = F.group_norm(leaves[0], 3, *leaves[1:])
        return [output, *torch.autograd.grad(output.sin().sum(), leaves)]

    plain = step()
    with normgrad.torch.override() as override:
        found = step()
    assert override.report().left == {"group_norm": {heuristics.PYTORCH_IS_FASTER: 1}}
    assert [one.stride() for one in found] == [one.stride() for one in plain]
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


def test_a_group_norm_of_one_dimension_is_refused_as_pytorch_does() -> None:
    errors = []
    for use in (nullcontext(), normgrad.torch.override()):
        with use, pytest.raises(IndexError) as error:
            torch.group_norm(random(4), 2)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def left(function: Any) -> dict[str, Any]:
    """The calls that are left to PyTorch, with the reasons."""
    with normgrad.torch.override() as override:
        function()
    assert taken(override) == 0
    return dict(override.report().left)


def test_what_is_left_to_pytorch_is_counted_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = random(4, 8)
    assert left(lambda: F.layer_norm(x.double(), [8])) == {"layer_norm": {heuristics.DTYPE: 1}}
    assert left(lambda: F.layer_norm(random(*[2] * 9), [2])) == {"layer_norm": {heuristics.DIMENSIONS: 1}}
    assert left(lambda: torch.vmap(lambda x: F.layer_norm(x, [8]))(x)) == {}  # handled above us
    assert left(lambda: torch.func.grad(lambda x: F.layer_norm(x, [8]).sum())(x)) == {
        "layer_norm": {aten_override.WATCHED: 1}
    }
    with FakeTensorMode():
        assert left(lambda: F.layer_norm(torch.empty(4, 8), [8])) == {"layer_norm": {aten_override.WATCHED: 1}}
    assert left(lambda: F.layer_norm(x.to("meta"), [8])) == {}  # another dispatch key than ours
    with pytest.raises(RuntimeError):
        F.layer_norm(x.to_sparse(), [8])
    monkeypatch.setattr(heuristics, "MIN_FLOAT32", 33)
    reasons = left(lambda: (F.layer_norm(x, [8]), F.layer_norm(x, [8]), F.group_norm(x, 2)))
    assert reasons == {
        "layer_norm": {heuristics.PYTORCH_IS_FASTER: 2},
        "group_norm": {heuristics.PYTORCH_IS_FASTER: 1},
    }


def test_subclasses_are_left_to_pytorch() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x = random(4, 8)
    both = TwoTensor(x, x + 1)
    assert left(lambda: F.layer_norm(both, [8])) == {"layer_norm": {aten_override.SUBCLASS: 1}}


def test_words_of_the_report() -> None:
    x = random(4, 8)
    override = normgrad.torch.override()
    assert repr(override) == "<override: on; no calls>"
    assert str(override.report()) == "no calls"
    F.layer_norm(x, [8])
    F.group_norm(x, 2)
    F.group_norm(x.double(), 2)
    override.undo()
    F.layer_norm(x, [8])
    lines = [
        "group_norm: 1 by normgrad",
        "layer_norm: 1 by normgrad",
        f"group_norm: 1 left to PyTorch: {heuristics.DTYPE}",
    ]
    assert str(override.report()).splitlines() == lines
    assert repr(override) == f"<override: off; {'; '.join(lines)}>"
    with override:
        F.layer_norm(x, [8])
    assert override.report().taken == {"group_norm": 1, "layer_norm": 2}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_an_override_cannot_be_copied(copied: Callable[[Any], Any]) -> None:
    """To undo the copy as well would leave the next override in force for ever."""
    with (
        normgrad.torch.override() as active,
        pytest.raises(TypeError, match=r"^an override cannot be copied or pickled: "),
    ):
        copied(active)


def test_as_a_decorator() -> None:
    @normgrad.torch.override()
    def on() -> bool:
        return is_on()

    assert not is_on()
    assert on()
    assert on.__name__ == "on"
    assert not is_on()


def test_generators_and_coroutines_are_decorated_for_as_long_as_they_run() -> None:
    x = random(4, 8).requires_grad_()

    def norm() -> str:
        return str(F.layer_norm(x, [8]).grad_fn.name())

    @normgrad.torch.override()
    def generator() -> Iterator[Any]:
        sent = yield norm()
        yield norm(), sent
        return 5

    @normgrad.torch.override()
    async def coroutine() -> str:
        await asyncio.sleep(0)
        return norm()

    running = generator()
    assert norm() == "NativeLayerNormBackward0"
    assert next(running) == "NormgradLayerNormBackward"
    assert running.send(3) == ("NormgradLayerNormBackward", 3)
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == 5
    assert asyncio.run(coroutine()) == "NormgradLayerNormBackward"
    assert norm() == "NativeLayerNormBackward0"


def test_what_cannot_be_decorated_is_refused() -> None:
    class Module:
        pass

    async def values() -> AsyncIterator[int]:
        yield 1

    for what in (Module, values, 5):
        with pytest.raises(TypeError, match="an override decorates functions, generators and coroutines, not "):
            normgrad.torch.override()(what)  # type: ignore[type-var]
        assert not is_on()


def test_a_finalizer_that_ends_an_override_while_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run anywhere, also where the lock is held."""
    first, read = normgrad.torch.override(), aten_override._read_tallies

    def collected() -> Any:
        monkeypatch.setattr(aten_override, "_read_tallies", read)
        first.undo()
        return read()

    monkeypatch.setattr(aten_override, "_read_tallies", collected)
    with normgrad.torch.override():
        assert is_on()
    assert not is_on()


def test_an_override_that_cannot_be_registered_is_not_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of PyTorch raise where another library has registered a function for the same key."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("there's already a kernel registered from python")

    before = aten_override._registration
    with monkeypatch.context() as patched:
        patched.setattr(aten_override, "_registration", None)
        patched.setattr(aten_override, "_register", refuse)
        with pytest.raises(RuntimeError, match="already a kernel registered"):
            normgrad.torch.override()
        assert (aten_override._in_force, aten_override._registration) == ((), None)
    assert aten_override._registration is before


def test_an_object_that_is_left_more_often_than_entered() -> None:
    x = random(4, 8).requires_grad_()
    override = normgrad.torch.override()
    override.__exit__(None, None, None)
    with override:
        assert F.layer_norm(x, [8]).grad_fn.name() == "NormgradLayerNormBackward"
    assert F.layer_norm(x, [8]).grad_fn.name() == "NativeLayerNormBackward0"


def test_a_profile_shows_the_names() -> None:
    x, images = random(4, 8), random(2, 4, 3, 3)
    with normgrad.torch.override(), torch.profiler.profile() as profile:
        one_gradient(x)
        F.group_norm(images.requires_grad_(), 2).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"aten::layer_norm", "NormgradLayerNorm", "NormgradLayerNormBackward"} <= names
    assert {"aten::group_norm", "NormgradGroupNorm", "NormgradGroupNormBackward"} <= names
    assert not {name for name in names if "native" in name and "backward" in name}


def test_the_backward_pass_after_the_block_is_ours() -> None:
    x = random(4, 8).requires_grad_()
    with normgrad.torch.override():
        output = F.layer_norm(x, [8])
    output.sum().backward()
    assert x.grad is not None


def test_inference_mode() -> None:
    x = random(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    plain = F.group_norm(x, 2)
    with normgrad.torch.override() as override, torch.inference_mode():
        output = F.group_norm(x, 2)
    assert taken(override) == 1
    assert output.is_inference()
    torch.testing.assert_close(output, plain)


def test_below_autograd_there_is_no_graph() -> None:
    """As in a C++ operator that calls this one and has a gradient of its own."""
    x = random(2, 4, 3, 3).requires_grad_()
    for norm in (lambda: F.layer_norm(x, [3]), lambda: F.group_norm(x, 2)):
        with normgrad.torch.override() as override, torch._C._AutoDispatchBelowAutograd():
            output = norm()
        assert (output.requires_grad, taken(override)) == (False, 1)


def test_autocast_sees_pytorchs_operator() -> None:
    x = random(4, 8, dtype=torch.bfloat16)
    norm = torch.nn.LayerNorm(8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = norm(x)
        with normgrad.torch.override() as override:
            ours = norm(x)
    assert (ours.dtype, taken(override)) == (plain.dtype, 1)


@pytest.fixture
def autocast_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Autocast on CUDA in a process without a GPU, where PyTorch would turn it off."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    with torch.autocast("cuda", torch.float16):
        yield


@pytest.mark.usefixtures("autocast_on_cuda")
def test_fake_tensors_under_autocast_on_cuda_have_pytorchs_dtypes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def dtypes() -> list[torch.dtype]:
        with FakeTensorMode():
            x = torch.empty(2, 4, 3, device="cuda", dtype=torch.float16)
            weight = torch.empty(4, device="cuda", dtype=torch.float16)
            calls = (F.layer_norm(x, [3]), F.group_norm(x, 2, weight, weight), F.layer_norm(x.double(), [3]))
            return [output.dtype for output in calls]

    plain = dtypes()
    assert plain == [torch.float32, torch.float32, torch.float64]
    with normgrad.torch.override() as override:
        assert dtypes() == plain
    assert override.report().left == {
        "layer_norm": {aten_override.WATCHED: 2},
        "group_norm": {aten_override.WATCHED: 1},
    }
    with normgrad.torch.override(autocast_dtype=torch.float16):
        assert dtypes() == [torch.float16, torch.float16, torch.float64]


def test_under_autocast_16_bit_data_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normgrad.torch.functional._is_autocast", lambda _: True)
    x = random(2, 4, 3, dtype=torch.bfloat16).requires_grad_()
    row, channel = random(3).requires_grad_(), random(4).requires_grad_()
    for norm, sizes, parameter in zip(aten_override._NORMS, ([3], 2), (row, channel), strict=True):
        function = aten_override._function(norm, under_autocast=True)
        with normgrad.torch.override() as override:
            output = function(x, sizes, parameter, parameter)
        assert taken(override) == 1
        assert output.dtype == torch.float32
        assert type(output.grad_fn.next_functions[0][0]).__name__ == "AccumulateGrad"  # of x, with no copy between
        found = torch.autograd.grad(output.sin().sum(), (x, parameter))
        assert [one.dtype for one in found] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("small", [False, True], ids=["ours", "left to PyTorch"])
def test_the_last_override_chooses_the_dtype_under_autocast(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normgrad.torch.functional._is_autocast", lambda _: True)
    functions = [aten_override._function(norm, under_autocast=True) for norm in aten_override._NORMS]
    x = random(2, 4, 3, dtype=torch.float32 if small else torch.bfloat16)

    def dtypes() -> set[torch.dtype]:
        layer_norm, group_norm = functions
        return {layer_norm(x, [3]).dtype, group_norm(x, 2).dtype}

    first = normgrad.torch.override(autocast_dtype=torch.bfloat16)
    assert dtypes() == {torch.bfloat16}
    with normgrad.torch.override() as second:
        assert dtypes() == {torch.float32}
        third = normgrad.torch.override(autocast_dtype=torch.bfloat16)
        first.undo()
        assert dtypes() == {torch.bfloat16}
        third.undo()
        assert dtypes() == {torch.float32}
    assert taken(second) == (0 if small else 6)
    decorated = normgrad.torch.override(autocast_dtype=torch.float16)(dtypes)
    assert decorated() == {torch.float16}
    assert repr(third).startswith("<override: off, autocast_dtype=torch.bfloat16; ")
    with pytest.raises(ValueError, match=r"autocast_dtype is torch.float64, and must be"):
        normgrad.torch.override(autocast_dtype=torch.float64)


_AUTOCAST_IS_BACK = """
import torch, normgrad.torch

def table():
    return torch._C._dispatch_dump("aten::layer_norm") + torch._C._dispatch_dump("aten::group_norm")

before = table()
with normgrad.torch.override():
    assert table() != before
assert table() == before
"""


def test_pytorchs_own_autocast_is_back_after_the_block() -> None:
    """In a process with one thread: beside others, the functions stay and hand every call on."""
    run_python(_AUTOCAST_IS_BACK)


def test_scripted_and_traced_models() -> None:
    x = random(4, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    for converted in (torch.jit.script(model), torch.jit.trace(model, x)):
        with normgrad.torch.override() as override:
            torch.testing.assert_close(converted(x), model(x))
        assert taken(override) == 2
    with normgrad.torch.override():
        traced = torch.jit.trace(model, x)
    assert "aten::layer_norm" in str(traced.inlined_graph)


def test_a_compiled_function_after_a_block_in_which_one_was_compiled() -> None:
    """What PyTorch's tracer has cached of our kernels goes with them."""

    def gradient(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.reset()
        leaf = x.clone().requires_grad_()
        compiled = torch.compile(lambda x: F.group_norm(F.layer_norm(x, [8]), 2).sin(), backend="aot_eager")
        return torch.autograd.grad(compiled(leaf).sum(), leaf)[0]

    x = random(4, 8)
    before = gradient(x)
    with normgrad.torch.override():
        torch.testing.assert_close(gradient(x), before, rtol=0, atol=0)
    torch.testing.assert_close(gradient(x), before, rtol=0, atol=0)


def test_a_view_of_the_output_of_a_transposed_input_works() -> None:
    x = random(2, 8, 5).transpose(1, 2)
    with normgrad.torch.override():
        assert F.layer_norm(x, [8]).view(10, 8).shape == (10, 8)
        assert normgrad.torch.LayerNorm(8)(x).view(10, 8).shape == (10, 8)


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
