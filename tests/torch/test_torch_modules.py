"""normgrad.torch.LayerNorm and GroupNorm: torch.nn's, with our backward pass."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import normgrad.torch
from normgrad.torch import functional, heuristics
from normgrad.torch.kernels import TorchKernel
from support.torch_databases import MODULES, modules
from support.torch_samples import random

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
every_module = pytest.mark.parametrize("name", MODULES)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OURS = {"LayerNorm": normgrad.torch.LayerNorm, "GroupNorm": normgrad.torch.GroupNorm}
SHAPES = {"LayerNorm": (4, 6, 10, 10), "GroupNorm": (4, 6, 10, 10)}


@pytest.fixture(autouse=True)
def small(small_tensors_are_ours: None) -> None:
    pass


def pair(name: str, *args: Any, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """PyTorch's module and ours, with the same parameters, which are not ones and zeros."""
    theirs, ours = getattr(torch.nn, name)(*args, **options), OURS[name](*args, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(theirs.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def some(name: str, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    return pair(name, *{"LayerNorm": ([10],), "GroupNorm": (3, 6)}[name], **options)


def results(module: torch.nn.Module, x: torch.Tensor, rounded: torch.dtype | None = None) -> list[torch.Tensor]:
    """Output, gradient of the input and of the parameters, for a gradient that a dtype can hold."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = module(leaf)
    grad_out = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(rounded or x.dtype).to(output)
    return [output.detach(), *torch.autograd.grad(output, [leaf, *module.parameters()], grad_out)]


def exact_results(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64."""
    return results(copy.deepcopy(module).double(), x.double(), x.dtype)


def assert_near(found: list[torch.Tensor], exact: list[torch.Tensor], pytorchs: Sequence[torch.Tensor] = ()) -> None:
    """One rounding to the result's dtype and what float32 rounds between: half of PyTorch's error if terms cancel."""
    for mine, right, theirs in zip(found, exact, pytorchs or exact, strict=True):
        step = torch.finfo(mine.dtype).eps
        largest, lost = (value.abs().max() if right.numel() else 0.0 for value in (right, theirs.double() - right))
        assert ((mine.double() - right).abs() <= step * right.abs() + max(4e-6 * largest, 0.5 * lost)).all()


@every_module
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_pytorchs_own_samples(name: str, dtype: torch.dtype) -> None:
    inputs = modules(name, dtype)
    assert len(inputs) >= 5
    for sample in inputs:
        arguments, call = sample.constructor_input, sample.forward_input
        theirs, ours = pair(name, *arguments.args, **arguments.kwargs)
        found = results(ours.to(dtype), call.args[0])
        assert {tensor.dtype for tensor in found} == {dtype}
        assert_near(found, exact_results(ours, call.args[0]), results(theirs.to(dtype), call.args[0]))


@every_module
@pytest.mark.usefixtures("one_thread")
def test_gradgrad(name: str) -> None:
    """PyTorch's check of second derivatives, in float64, where the module is PyTorch's own function."""
    for sample in modules(name, torch.float64):
        if sample.forward_input.args[0].numel() > 200:
            continue
        module = OURS[name](*sample.constructor_input.args, **sample.constructor_input.kwargs).double()
        assert torch.autograd.gradgradcheck(module, sample.forward_input.args)


@every_module
def test_second_derivatives_in_float32(name: str) -> None:
    theirs, ours = some(name)
    x = random(*SHAPES[name])

    def second(module: torch.nn.Module, x: torch.Tensor) -> Any:
        leaf = x.clone().requires_grad_()
        leaves = [leaf, *module.parameters()]
        first = torch.autograd.grad(module(leaf).sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), leaves)

    exact = second(theirs.double(), x.double())
    for mine, right in zip(second(ours, x), exact, strict=True):
        assert (mine.double() - right).abs().max() <= 4e-6 * right.abs().max()


@every_module
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"bias": False}, {"eps": 0.1}, {"dtype": torch.bfloat16}], ids=str
)
def test_state_dicts_and_words(name: str, options: dict[str, Any]) -> None:
    if name == "LayerNorm" and "affine" in options:
        options = {"elementwise_affine": False}
    if name == "GroupNorm" and "bias" in options and torch.__version__ < "2.12":
        pytest.skip("this PyTorch's GroupNorm has no such argument")
    theirs, ours = some(name, **options)
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, type(theirs))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert (mine.dtype, mine.requires_grad) == (other.dtype, other.requires_grad)
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    theirs.load_state_dict(torch.load(buffer))


@every_module
def test_copies_and_pickles(name: str) -> None:
    _, ours = some(name)
    x = random(*SHAPES[name])
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(results(again, x), results(ours, x), rtol=0, atol=0)


@every_module
@pytest.mark.parametrize("parameters", ["float32", "as the data"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_statistics_are_float32(name: str, dtype: torch.dtype, parameters: str) -> None:
    """Data whose mean 16 bits cannot hold: with 16-bit statistics the gradient would be far off."""
    _, ours = some(name)
    ours = ours if parameters == "float32" else ours.to(dtype)
    x = (random(*SHAPES[name]) + 20.3).to(dtype)
    for mine, right in zip(results(ours, x), exact_results(ours, x), strict=True):
        step = torch.finfo(mine.dtype).eps
        # The mean is twenty times the deviation, and so is its rounding.
        assert ((mine.double() - right).abs() <= step * right.abs() + 20 * 4e-6 * right.abs().max()).all()


@every_module
@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_forward_passes(name: str, ours_first: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is chosen, the results are the same to rounding."""
    choose = {"LayerNorm": "takes_layer_norm_forward", "GroupNorm": "takes_group_norm_forward"}[name]
    monkeypatch.setattr(heuristics, choose, lambda *_: ours_first)
    _, ours = some(name)
    x = random(*SHAPES[name], dtype=dtype)
    assert_near(results(ours, x), exact_results(ours, x))


def test_heuristics_by_layout_and_dtype() -> None:
    x = torch.empty(16, 256, 16, 16, dtype=torch.float16)
    weight = torch.empty(256)
    assert not heuristics.takes_layer_norm_forward(x, weight)
    assert heuristics.takes_layer_norm_forward(x, None)
    assert heuristics.takes_group_norm_forward(x, 256, weight)
    assert heuristics.takes_group_norm_forward(x.contiguous(memory_format=torch.channels_last), 256, weight)
    assert not heuristics.takes_group_norm_forward(x.float(), 256, weight)
    assert heuristics.takes_group_norm_forward(x.float().transpose(0, 1), 256, weight)
    large = torch.empty(4, 128, 128, 128)
    assert heuristics.takes_layer_norm_forward(large, weight)
    assert heuristics.takes_group_norm_forward(large, 128 * 128, weight)
    assert heuristics.takes_layer_norm_forward(large.bfloat16(), weight)
    assert not heuristics.takes_layer_norm_forward(large[:1].bfloat16(), weight)


@every_module
def test_small_tensors_of_float32_are_pytorchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = some(name)
    x = random(*SHAPES[name]).requires_grad_()
    assert "Norm" in type(ours(x).grad_fn).__name__
    assert type(ours(x).grad_fn).__name__ != type(theirs(x).grad_fn).__name__
    monkeypatch.setattr(heuristics, "MIN_FLOAT32", x.numel() + 1)
    assert type(ours(x).grad_fn).__name__ == type(theirs(x).grad_fn).__name__
    torch.testing.assert_close(results(ours, x), results(theirs, x), rtol=0, atol=0)
    last = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    assert type(ours(last).grad_fn).__name__ != type(theirs(last).grad_fn).__name__
    monkeypatch.setattr(heuristics, "MIN_FLOAT32_CHANNELS_LAST", x.numel() + 1)
    assert type(ours(last).grad_fn).__name__ == type(theirs(last).grad_fn).__name__


@every_module
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_tensors_of_16_bits_are_pytorchs_beside_float32(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = some(name)
    x = random(*SHAPES[name]).to(dtype).requires_grad_()
    last = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    monkeypatch.setattr(heuristics, "MIN_16_BITS", {dtype: x.numel() + 1})
    assert type(ours(x).grad_fn).__name__ == type(theirs(x).grad_fn).__name__
    torch.testing.assert_close(results(ours, x), results(theirs, x), rtol=0, atol=0)
    assert type(ours(last).grad_fn).__name__ != type(theirs(last).grad_fn).__name__
    narrow = ours.to(dtype)  # beside which PyTorch's statistics would be 16-bit too
    assert type(narrow(x).grad_fn).__name__ != type(theirs.to(dtype)(x).grad_fn).__name__


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weight_gradients_of_16_bit_data_are_exact(dtype: torch.dtype) -> None:
    """PyTorch's LayerNorm sums them in 16 bits."""
    for rows in (4, 500):
        x = random(rows, 6, 10, 10, dtype=dtype)
        _, ours = some("LayerNorm")
        for mine, right in zip(results(ours, x)[2:], exact_results(ours, x)[2:], strict=True):
            assert (mine.double() - right).abs().max() <= 1e-6 * right.abs().max()


@every_module
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "expanded"])
def test_layouts(name: str, layout: str) -> None:
    theirs, ours = some(name)
    x = random(*SHAPES[name])
    match layout:
        case "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        case "transposed":
            x = x.transpose(2, 3)
        case "expanded":
            x = x[:1].expand(x.shape)
    found, expected = results(ours, x), results(theirs, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if name == "GroupNorm" and layout == "channels_last":
        assert [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in found[:2]] == [True, True]


@every_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    theirs, ours = some(name)
    x = random(*SHAPES[name], dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = results(ours, x), results(theirs, x)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    assert_near(found, exact_results(ours, x))


@every_module
def test_what_pytorch_refuses_is_refused_as_it_does(name: str) -> None:
    theirs, ours = some(name)
    for x in (random(2, 7), random(4), random(2, 10).to(torch.int32), random(2, 6, 10).to(torch.complex64)):
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as expected:
            theirs(x)
        with pytest.raises(type(expected.value)) as found:
            ours(x)
        assert str(found.value) == str(expected.value)
    for x in (None, [1.0, 2.0], random(2, 10).numpy(), "x"):
        with pytest.raises((TypeError, AttributeError)) as expected:
            theirs(x)
        with pytest.raises(type(expected.value)) as found:
            ours(x)
        assert str(found.value) == str(expected.value)
    single = random(1, 6)
    if name == "GroupNorm":
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            OURS[name](6, 6)(single)


WRONG_PARAMETERS = {
    "one element": lambda size: random(1),
    "a dimension more": lambda size: random(1, size),
    "another size": lambda size: random(size + 1),
    "two dimensions": lambda size: random(2, size // 2),
    "sparse": lambda size: random(size).to_sparse(),
}


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
AMBIGUOUS_IMAGES: dict[str, Callable[[int], torch.Tensor]] = {
    # dense in channels_last, and not by the stride of a dimension of one
    "tokens": lambda dims: random(2, 300, 6).transpose(1, 2).reshape(2, 6, 300, *[1] * (dims - 3)),
    # not dense, but with the strides of channels_last
    "crop": lambda dims: random(2, 6, *[9] * (dims - 2)).contiguous(memory_format=CHANNELS_LAST[dims])[:, :, 1:8, 2:],
    # dense in both formats
    "pooled": lambda dims: random(2, *[1] * (dims - 2), 6).movedim(-1, 1),
}


@pytest.mark.usefixtures("small_tensors_are_ours")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [4, 5])
@pytest.mark.parametrize("images", AMBIGUOUS_IMAGES.values(), ids=list(AMBIGUOUS_IMAGES))
def test_data_whose_strides_tell_no_memory_format(
    images: Callable[[int], torch.Tensor], dims: int, dtype: torch.dtype
) -> None:
    """Outputs and gradients have PyTorch's strides all the same."""
    data = images(dims).to(dtype)
    theirs, ours = pair("GroupNorm", 1, 6)
    strides = []
    for module in (theirs, ours):
        leaf = data.detach().requires_grad_()
        output = module(leaf)
        (gradient,) = torch.autograd.grad(output.square().sum(), leaf)
        strides.append((output.stride(), gradient.stride()))
    assert strides[0] == strides[1]
    assert_near(results(ours, data), exact_results(ours, data))


@every_module
@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_in_strided_memory(
    name: str, ours_first: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an expanded scale, or a column of a projection: PyTorch's kernel of GroupNorm takes contiguous ones alone."""
    monkeypatch.setattr(heuristics, "takes_layer_norm_forward", lambda *_: ours_first)
    monkeypatch.setattr(heuristics, "takes_group_norm_forward", lambda *_: ours_first)
    _, ours = some(name)
    size = len(ours.weight)
    ours.weight = torch.nn.Parameter(random(size, 3, seed=1)[:, 1])
    ours.bias = torch.nn.Parameter(random(1, seed=2).expand(size))
    x = random(*SHAPES[name]).to(dtype)
    assert not ours.weight.is_contiguous()
    assert_near(results(ours, x), exact_results(ours, x))


@every_module
@pytest.mark.parametrize("wrong", WRONG_PARAMETERS.values(), ids=WRONG_PARAMETERS)
@pytest.mark.parametrize("given", [("weight", "bias"), ("weight",), ("bias",)], ids="+".join)
def test_wrong_parameters_are_refused_as_pytorch_does(
    name: str, wrong: Any, given: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both passes would be ours, which would broadcast some of them."""
    monkeypatch.setattr(heuristics, "takes_layer_norm_forward", lambda *_: True)
    monkeypatch.setattr(heuristics, "takes_group_norm_forward", lambda *_: True)
    for x in (random(*SHAPES[name]), random(*SHAPES[name]).bfloat16()):
        pair_of_modules = some(name)
        errors = []
        for module in pair_of_modules:
            size = len(module.weight)
            for parameter in ("weight", "bias"):
                value = torch.nn.Parameter(wrong(size).to(x.dtype)) if parameter in given else None
                setattr(module, parameter, value)
        theirs, ours = pair_of_modules
        for module, context in ((theirs, nullcontext), (ours, nullcontext), (theirs, normgrad.torch.override)):
            with context(), pytest.raises((RuntimeError, ValueError, NotImplementedError)) as error:
                module(x)
            errors.append((type(error.value), str(error.value)))
        assert errors[1:] == errors[:1] * 2


@pytest.mark.parametrize("groups", [2.0, True, None])
def test_a_number_of_groups_that_is_no_int_is_refused_as_pytorch_does(groups: Any) -> None:
    errors = []
    for function in (torch.nn.functional.group_norm, functional.group_norm):
        with pytest.raises(TypeError) as error:
            function(random(2, 4, 5), groups)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("shape", [(0, 6, 5), (2, 6, 0), (0, 6), (2, 0, 5)], ids=str)
def test_empty_data_of_group_norm(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for ours_first in (False, True):
        monkeypatch.setattr(heuristics, "takes_group_norm_forward", lambda *_, first=ours_first: first)
        x = random(*shape).requires_grad_()
        weight, bias = (torch.ones(shape[1], requires_grad=True) for _ in range(2))
        with normgrad.torch.override() as ours:
            output = torch.nn.functional.group_norm(x, 3, weight, bias)
        assert dict(ours.report().taken) == {"group_norm": 1}
        output.sum().backward()
        assert output.shape == x.shape
        assert not weight.grad.any()
        assert not bias.grad.any()


@pytest.mark.parametrize("shape", [(0, 10), (3, 0, 10), (0, 2, 10), (3, 10, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_data_of_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = normgrad.torch.LayerNorm(shape[-1], dtype=dtype)
    for repeated in (False, True):  # the gradient of a sum repeats one element, and has to be copied
        x = random(*shape).to(dtype).requires_grad_()
        output = norm(x)
        assert output.shape == x.shape
        norm.zero_grad()
        output.backward(torch.ones((), dtype=dtype).expand(shape) if repeated else torch.ones_like(output))
        assert x.grad.shape == x.shape
        assert not norm.weight.grad.any()
        assert not norm.bias.grad.any()


def test_no_normalized_dimensions_are_refused_as_pytorch_does() -> None:
    for x in (random(4, 6).bfloat16(), random().bfloat16()):
        errors = []
        for function, context in (
            (torch.nn.functional.layer_norm, nullcontext),
            (functional.layer_norm, nullcontext),
            (torch.nn.functional.layer_norm, normgrad.torch.override),
        ):
            with context(), pytest.raises(RuntimeError, match="at least 1-dimensional") as error:
                function(x, [])
            errors.append(str(error.value))
        assert errors[1:] == errors[:1] * 2


@every_module
def test_frozen_parameters_and_no_grad(name: str) -> None:
    theirs, ours = some(name)
    x = random(*SHAPES[name])
    with torch.no_grad():
        assert not ours(x).requires_grad
        torch.testing.assert_close(ours(x), theirs(x))
    for parameter in ours.parameters():
        parameter.requires_grad_(False)
    assert not ours(x).requires_grad
    leaf = x.clone().requires_grad_()
    ours(leaf).sum().backward()
    assert leaf.grad is not None
    assert all(parameter.grad is None for parameter in ours.parameters())


class _Cut(torch.autograd.Function):
    """A function without a gradient for its first argument."""

    @staticmethod
    def forward(ctx: Any, cut: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return cut + kept

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad_out


@every_module
def test_without_a_gradient_of_the_output_there_are_none(name: str) -> None:
    """As by PyTorch's modules: an optimizer skips parameters without a gradient, and decays those whose it is zero."""
    for module in some(name):
        x, kept = (random(*SHAPES[name], seed=seed).requires_grad_() for seed in range(2))
        _Cut.apply(module(x), kept).sum().backward()
        assert kept.grad is not None
        assert x.grad is None
        assert all(parameter.grad is None for parameter in module.parameters())


@every_module
def test_a_batch_of_gradients(name: str) -> None:
    _, ours = some(name)
    leaf = random(*SHAPES[name]).requires_grad_()
    output = ours(leaf)
    grads = random(3, *output.shape)
    (found,) = torch.autograd.grad(output, leaf, grads, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(output, leaf, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(found, torch.stack(expected))


@every_module
def test_transforms_and_forward_mode(name: str) -> None:
    theirs, ours = some(name)
    x = random(*SHAPES[name])

    def per_sample(module: torch.nn.Module) -> Any:
        def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(module, parameters, (x[None],)).sin().sum()

        return torch.vmap(torch.func.grad(loss), (None, 0))(dict(module.named_parameters()), x)

    torch.testing.assert_close(per_sample(ours), per_sample(theirs), rtol=1e-4, atol=1e-5)
    tangent = random(*SHAPES[name], seed=3)
    found, expected = (torch.func.jvp(module, (x,), (tangent,)) for module in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@every_module
def test_per_sample_gradients_of_small_tensors_are_pytorchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples at once: a kernel call for each of them takes many times as long."""
    monkeypatch.setattr(heuristics, "MIN_FLOAT32", math.prod(SHAPES[name][1:]) + 1)
    _, ours = some(name)
    parameters = {key: parameter.detach() for key, parameter in ours.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(ours, parameters, (x[None],)).sin().sum()

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **kwargs or {})

    with Watch():
        torch.vmap(torch.func.grad(loss), (None, 0))(parameters, random(*SHAPES[name]))
    assert [operator for operator in seen if "norm" in operator]
    assert not [operator for operator in seen if "normgrad" in operator]


@every_module
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(name: str, dynamic: bool) -> None:
    torch.compiler.reset()
    _, ours = some(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for samples in (4, 5):
        x = random(samples, *SHAPES[name][1:])
        torch.testing.assert_close(results(compiled, x), results(ours, x), rtol=1e-4, atol=2e-5)  # PyTorch's formula


@every_module
def test_exported(name: str) -> None:
    _, ours = some(name)
    x = random(*SHAPES[name])
    exported = torch.export.export(ours, (x,))
    torch.testing.assert_close(exported.module()(x), ours(x))


@every_module
def test_meta_and_fake_tensors(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    _, ours = some(name)
    assert ours.to("meta")(torch.empty(SHAPES[name], device="meta")).shape == SHAPES[name]
    with FakeTensorMode():
        fake = some(name)[1](torch.empty(SHAPES[name]))
    assert fake.shape == SHAPES[name]


@pytest.mark.parametrize("elements", [heuristics.MIN_CUDA - 1, heuristics.MIN_CUDA])
def test_small_tensors_on_cuda_are_left_to_pytorch(elements: int) -> None:
    rows = SimpleNamespace(is_cuda=True, is_cpu=False, numel=lambda: elements, dim=lambda: 2)
    assert heuristics.layer_norm_is_slower(rows, None) == (elements < heuristics.MIN_CUDA)
    assert heuristics.group_norm_is_slower(rows, None) == (elements < heuristics.MIN_CUDA)
    images = SimpleNamespace(is_cuda=True, numel=lambda: elements, dim=lambda: 4, is_contiguous=lambda: False)
    assert not heuristics.group_norm_is_slower(images, None)


def test_options_are_checked_and_shown() -> None:
    norm = normgrad.torch.LayerNorm(4, autocast_dtype=torch.bfloat16)
    assert "autocast_dtype=torch.bfloat16" in repr(norm)
    with pytest.raises(ValueError, match=r"autocast_dtype is torch.float64, and must be"):
        normgrad.torch.GroupNorm(2, 4, autocast_dtype=torch.float64)
    with pytest.raises(ValueError, match="compiled is 'inductor', and must be"):
        normgrad.torch.LayerNorm(4, compiled="inductor")
    model = torch.nn.Sequential(torch.nn.LayerNorm(4))
    done = normgrad.torch.replace_norms(model, autocast_dtype=torch.float16)
    assert model[0].autocast_dtype == torch.float16
    done.undo()
    assert not hasattr(model[0], "autocast_dtype")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_contract_refuses_is_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast on CUDA 16-bit data gives a float32 output, by the formula too."""
    monkeypatch.setattr(TorchKernel, "if_taken", lambda self, *args: None)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    by_row = functional.NormgradLayerNorm.apply(x, None, None, (8,), 1e-5, torch.float32)
    by_group = functional.NormgradGroupNorm.apply(x, None, None, (6, 8, 1, 1), 1e-5, torch.float32)
    expected = torch.nn.functional.layer_norm(x.double(), (8,), eps=1e-5)
    for output in (by_row, by_group):
        assert output.dtype == torch.float32
        torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_the_formula_have_the_precision_of_the_data(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the output has 16 bits and the data float32, the gradient of the data is not rounded to 16 bits."""
    monkeypatch.setattr(TorchKernel, "if_taken", lambda self, *args: None)
    x, grad = random(6, 8).requires_grad_(), random(6, 8, seed=1).to(dtype)
    wide = x.detach().double().requires_grad_()
    torch.nn.functional.layer_norm(wide, (8,), eps=1e-5).backward(grad.double())
    for output in (
        functional.NormgradLayerNorm.apply(x, None, None, (8,), 1e-5, dtype),
        functional.NormgradGroupNorm.apply(x, None, None, (6, 8, 1, 1), 1e-5, dtype),
    ):
        (found,) = torch.autograd.grad(output, x, grad)
        torch.testing.assert_close(found.double(), wide.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm"])
def test_a_saved_tensor_that_comes_back_in_another_dtype(name: str) -> None:
    """Hooks that compress what is saved may not restore its dtype. PyTorch's modules refuse that, ours compute."""
    theirs, ours = some(name)
    x = random(4, 6, 10)

    def gradient(module: torch.nn.Module, saved: torch.dtype) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(saved) if t.shape == x.shape else t, lambda t: t):
            output = module(leaf)
        return torch.autograd.grad(output.sin().sum(), leaf)[0]

    expected = gradient(theirs, torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(gradient(ours, dtype), expected, rtol=2e-2, atol=2e-2)
