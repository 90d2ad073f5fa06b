"""Derivatives of torch.ops.normgrad, of first and higher orders, in both modes, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap

from normgrad.testing.expected import as_tuple
from normgrad.torch import batching, formulas
from support.torch_samples import differentiable, random, samples, without_running_statistics

# PyTorch's own, at the first use of forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

ops = torch.ops.normgrad
CALLS = [(name, number) for name, calls in samples().items() for number in range(len(calls))]
every_call = pytest.mark.parametrize(("name", "number"), CALLS)
F = torch.nn.functional


def close(actual: Any, expected: Any) -> None:
    """Float32 results of float32 formulas against float64: a few units in the last place of the largest."""
    actual, expected = (torch.utils._pytree.tree_leaves(values) for values in (actual, expected))
    assert len(actual) == len(expected)
    for mine, exact in zip(actual, expected, strict=True):
        if exact is None:
            assert mine is None
            continue
        assert mine.shape == exact.shape
        assert (mine.double() - exact).abs().max() <= 4e-6 * exact.abs().max()


def widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args)


def scalar_of(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A number that depends on every result, and not linearly."""

    def scalar(*args: Any) -> torch.Tensor:
        results = as_tuple(function(*args))
        parts = [
            # Slowly, so that the rounding of a large result is not made much larger.
            (result / 16).sin().mul(torch.linspace(-1, 2, result.numel()).reshape(result.shape).to(result)).sum()
            for result in results
            if result is not None
        ]
        return torch.stack(parts).sum()

    return scalar


def of_tensors(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The function of its differentiable arguments alone, and those."""
    places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.is_floating_point()]

    def restricted(*tensors: torch.Tensor) -> Any:
        whole = list(args)
        for place, tensor in zip(places, tensors, strict=True):
            whole[place] = tensor
        return function(*whole)

    return restricted, [args[place] for place in places]


def twice(name: str, number: int) -> list[tuple[Callable[..., torch.Tensor], list[torch.Tensor]]]:
    """The operator in float32 and its formula in float64, each a number of its differentiable arguments."""
    args = without_running_statistics(name, samples()[name][number])
    return [
        of_tensors(scalar_of(getattr(ops, name)), args),
        of_tensors(scalar_of(getattr(formulas, name)), widened(args)),
    ]


def gradients(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = differentiable(*tensors)
    found = torch.autograd.grad(function(*leaves), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]


def second(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    def first(*leaves: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad(function(*leaves), leaves, create_graph=True, allow_unused=True)
        return torch.stack([one.square().sum() for one in found if one is not None]).sum()

    return gradients(first, tensors)


def tangents_of(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(random(*tensor.shape, seed=11).to(tensor) for tensor in tensors)


# The formulas are what autograd is checked against: first of all they must be right themselves.


@every_call
def test_formulas_are_the_operators(name: str, number: int) -> None:
    args = without_running_statistics(name, samples(torch.float64)[name][number])
    exact = getattr(formulas, name)(*args)
    single = without_running_statistics(name, samples()[name][number])
    close(getattr(ops, name)(*single), exact)


@pytest.mark.parametrize("number", [0, 1])
def test_formulas_against_pytorch_in_float64(number: int) -> None:
    input, shape, weight, bias, eps = samples(torch.float64)["layer_norm"][number]
    leaves = [leaf for leaf in differentiable(input, weight, bias) if leaf is not None]
    grad_out = random(*input.shape, dtype=torch.float64)
    expected = torch.autograd.grad(F.layer_norm(leaves[0], shape, *(leaves[1:] or (None, None)), eps), leaves, grad_out)
    _, mean, rstd = formulas.layer_norm(input, shape, weight, bias, eps)
    found = formulas.layer_norm_backward(grad_out, input, shape, mean, rstd, weight, bias)
    torch.testing.assert_close(found[: len(leaves)], expected)

    input, weight, bias, *sizes, eps = samples(torch.float64)["group_norm"][number]
    leaves = [leaf for leaf in differentiable(input, weight, bias) if leaf is not None]
    expected = torch.autograd.grad(F.group_norm(leaves[0], 3, *(leaves[1:] or (None, None)), eps), leaves, grad_out)
    _, mean, rstd = formulas.group_norm(input, weight, bias, *sizes, eps)
    found = formulas.group_norm_backward(grad_out, input, mean, rstd, weight, *sizes)
    torch.testing.assert_close(found[: len(leaves)], expected)


def test_formulas_of_batch_norm_against_pytorch_in_float64() -> None:
    x, weight, bias = differentiable(*(random(*shape, dtype=torch.float64) for shape in ((8, 3, 5), (3,), (3,))))
    grad_out = random(8, 3, 5, dtype=torch.float64, seed=2)
    expected = torch.autograd.grad(F.batch_norm(x, None, None, weight, bias, True), (x, weight, bias), grad_out)
    per_rank = [formulas.batch_norm_stats(part) for part in (x[:2], x[2:])]
    means, invstds = (torch.stack(parts) for parts in zip(*per_rank, strict=True))
    counts = torch.tensor([10, 30], dtype=torch.int32)
    mean, invstd = formulas.batch_norm_gather_stats_with_counts(x, means, invstds, None, None, 0.1, 1e-5, counts)
    output = formulas.batch_norm_elemt(x, weight, bias, mean, invstd)
    torch.testing.assert_close(torch.autograd.grad(output, (x, weight, bias), grad_out), expected)
    sums = formulas.batch_norm_reduce_backward(grad_out, x, mean, invstd, weight)
    found = formulas.batch_norm_elemt_backward(grad_out, x, mean, invstd, weight, *sums[:2], counts)
    torch.testing.assert_close((found, *sums[2:]), expected)


@every_call
def test_first_derivatives(name: str, number: int) -> None:
    ours, exact = twice(name, number)
    close(gradients(*ours), gradients(*exact))


@every_call
def test_second_derivatives(name: str, number: int) -> None:
    ours, exact = twice(name, number)
    close(second(*ours), second(*exact))


@every_call
def test_forward_mode(name: str, number: int) -> None:
    def tangents(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
        with forward_ad.dual_level():
            duals = map(forward_ad.make_dual, tensors, tangents_of(tensors))
            results = [result for result in as_tuple(function(*duals)) if result is not None]
            return [forward_ad.unpack_dual(result).tangent for result in results]

    args = without_running_statistics(name, samples()[name][number])
    ours = tangents(*of_tensors(getattr(ops, name), args))
    close(ours, tangents(*of_tensors(getattr(formulas, name), widened(args))))


@every_call
def test_forward_over_reverse(name: str, number: int) -> None:
    def tangent(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        return jvp(grad(function, tuple(range(len(tensors)))), tuple(tensors), tangents_of(tensors))

    ours, exact = twice(name, number)
    close(tangent(*ours), tangent(*exact))


def of_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    layer_norm = formulas.layer_norm if x.dtype == torch.float64 else ops.layer_norm
    return scalar_of(layer_norm)(x, x.shape[-1:], weight, bias)


THREE = (random(4, 6, 8), random(8), random(8, seed=1))


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: grad(lambda *a: jvp(f, a, tuple(x.cos() for x in a))[1], (0, 1, 2)),
        lambda f: grad(lambda *a: sum(g.square().sum() for g in grad(f, (0, 1, 2))(*a)), (0, 1, 2)),
        lambda f: vmap(f, (0, None, None)),
        lambda f: vmap(vmap(f, (0, None, None)), (0, None, None)),
        lambda f: vmap(grad(f, (0, 1, 2)), (0, None, None)),
        lambda f: lambda x, w, b: vmap(grad(f, (0, 1, 2)), (1, 0, None))(x, torch.stack([w] * 6), b),
        lambda f: lambda x, w, b: hessian(f)(x[0, :2], w, b),
        lambda f: lambda x, w, b: jacfwd(grad(f))(x[0, :2], w, b),
        lambda f: lambda x, w, b: vjp(f, x, w, b)[1](torch.ones((), dtype=x.dtype)),
    ],
    ids=[
        "grad-jvp",
        "grad-grad",
        "vmap",
        "vmap-vmap",
        "vmap-grad",
        "vmap-grad-weights",
        "hessian",
        "jacfwd-grad",
        "vjp",
    ],
)
def test_transforms(transformed: Callable[..., Any]) -> None:
    close(transformed(of_layer_norm)(*THREE), transformed(of_layer_norm)(*widened(THREE)))


def test_third_derivatives() -> None:
    def of(f: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        return grad(lambda *a: sum(g.square().sum() for g in grad(f, (0, 1, 2))(*a)), (0, 1, 2))

    def third(*args: torch.Tensor) -> Any:
        return of(lambda *a: sum(g.sin().sum() for g in grad(of_layer_norm, (0, 1, 2))(*a)))(*args)

    close(third(*THREE), third(*widened(THREE)))


@pytest.mark.parametrize("name", samples())
def test_vmap_of_every_operator(name: str) -> None:
    for args in samples()[name]:
        args = without_running_statistics(name, args)
        function, tensors = of_tensors(getattr(ops, name), args)
        batched = [torch.stack([tensor, tensor.flip(0), 2 * tensor], -1) for tensor in tensors]
        found = vmap(lambda *a, f=function: tuple(r for r in as_tuple(f(*a)) if r is not None), -1)(*batched)
        expected = [as_tuple(function(*(b[..., sample] for b in batched))) for sample in range(3)]
        stacked = [torch.stack(results) for results in zip(*expected, strict=True) if results[0] is not None]
        torch.testing.assert_close(found, tuple(stacked))


@pytest.mark.parametrize("name", samples())
def test_vmap_over_an_empty_batch(name: str) -> None:
    args = without_running_statistics(name, samples()[name][0])
    function, tensors = of_tensors(getattr(ops, name), args)

    def wanted(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(result for result in as_tuple(function(*tensors)) if result is not None)

    expected = wanted(*tensors)
    batched = [torch.stack([tensor] * 2, -1) for tensor in tensors]
    for found, one in zip(vmap(wanted, -1)(*(tensor[..., :0] for tensor in batched)), expected, strict=True):
        assert (found.shape, found.dtype) == ((0, *one.shape), one.dtype)
    nested = vmap(vmap(wanted, -1), 0)(*(tensor.expand(0, *tensor.shape) for tensor in batched))
    for found, one in zip(nested, expected, strict=True):
        assert (found.shape, found.device) == ((0, 2, *one.shape), one.device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_16_bit_data(dtype: torch.dtype) -> None:
    """The statistics that the backward pass gets are float32, so its results are the float32 ones, rounded."""
    input, shape, weight, bias, eps = samples(dtype)["layer_norm"][0]
    leaves = differentiable(input, weight, bias)
    grad_out = random(*input.shape, dtype=dtype)
    found = torch.autograd.grad(ops.layer_norm(leaves[0], shape, *leaves[1:], eps)[0], leaves, grad_out)
    wide = differentiable(*widened((input, weight, bias)))
    exact = torch.autograd.grad(F.layer_norm(wide[0], shape, *wide[1:], eps), wide, grad_out.double())
    assert [one.dtype for one in found] == [dtype, torch.float32, torch.float32]
    for mine, right in zip(found, exact, strict=True):
        step = torch.finfo(mine.dtype).eps
        assert ((mine.double() - right).abs() <= step * right.abs() + 1e-6 * right.abs().max()).all()


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_vmap_in_one_call_has_the_bits_of_a_call_per_sample(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, calls = torch.ops.normgrad, []
    original = batching.call_per_sample
    monkeypatch.setattr(batching, "call_per_sample", lambda *args: calls.append(args) or original(*args))
    x, grad, weight = random(5, rows, 6, 4), random(5, rows, 6, 4, seed=1), random(4)
    channel = random(6)
    mean, rstd = random(5, rows, 6, 1), random(5, rows, 6, 1, seed=2).abs()

    def backward(mask: list[bool]) -> Any:
        return lambda g, x, m, r: _present(ops.layer_norm_backward(g, x, [4], m, r, weight, None, mask))

    for dim in (0, 2):
        for function, tensors in (
            (lambda x: ops.layer_norm(x, [4], weight, weight), (x,)),
            (lambda x: ops.group_norm(x, channel, None, rows, 6, 4, 3), (x,)),
            (backward([True, False, False]), (grad, x, mean, rstd)),
        ):
            moved = [tensor.movedim(0, dim).contiguous() for tensor in tensors]
            found = vmap(function, dim)(*moved)
            alone = [function(*sample) for sample in zip(*tensors, strict=True)]
            expected = [torch.stack(results) for results in zip(*alone, strict=True)]
            torch.testing.assert_close(list(found), expected, rtol=0, atol=0)
    assert not calls
    vmap(backward([True, True, False]))(grad, x, mean, rstd)  # a gradient of the weight for each sample
    vmap(lambda x, w: ops.layer_norm(x, [4], w)[0], (0, 0))(x, random(5, 4))
    assert len(calls) == 2


def _present(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result for result in results if result is not None)
