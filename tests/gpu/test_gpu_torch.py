"""``normgrad.torch`` on the GPU: operators, derivatives, modules, override, compilation, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import normgrad.torch
from normgrad.testing import oracle, terms
from normgrad.testing.expected import as_tuple
from normgrad.torch import formulas
from support.gpu import DTYPES, check_results, on_host
from support.torch_samples import differentiable, random, samples, without_running_statistics

ops = torch.ops.normgrad


def on_gpu(args):
    return tuple(arg.detach().cuda() if isinstance(arg, torch.Tensor) else arg for arg in args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", samples())
def test_operators_are_within_the_bound_on_the_first_call_and_the_cached_one(name, dtype):
    names = [argument.name for argument in getattr(ops, name).default._schema.arguments]
    for args in samples(dtype)[name]:
        exact, magnitudes = (
            getattr(module, name)(**dict(zip(names, map(on_host, args), strict=True))) for module in (oracle, terms)
        )
        for _ in range(2):
            check_results(getattr(ops, name)(*on_gpu(args)), exact, magnitudes, name)


@pytest.mark.parametrize("name", samples())
def test_opcheck(name):
    for args in samples()[name]:
        leaves = list(on_gpu(args))
        for position, leaf in enumerate(leaves):
            in_place = name == "batch_norm_gather_stats_with_counts" and position in (3, 4)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not in_place:
                leaf.requires_grad_()
        torch.library.opcheck(getattr(ops, name).default, tuple(leaves))


def scalar_of(function, args):
    """Return a scalar that depends on every result."""
    results = [result for result in as_tuple(function(*args)) if result is not None]
    weights = [torch.linspace(-1, 2, result.numel()).reshape(result.shape).to(result) for result in results]
    return torch.stack([(r / 16).sin().mul(w).sum() for r, w in zip(results, weights, strict=True)]).sum()


def two_derivatives(function, args):
    leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    zeros = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(scalar_of(function, args), leaves, create_graph=True, **zeros)
    return [*first, *torch.autograd.grad(sum(one.square().sum() for one in first), leaves, **zeros)]


@pytest.mark.parametrize("name", samples())
def test_first_and_second_derivatives_are_those_of_the_formula_in_float64(name):
    for args in samples()[name]:
        args = without_running_statistics(name, args)
        double = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        found = two_derivatives(getattr(ops, name), differentiable(*on_gpu(args)))
        exact = two_derivatives(getattr(formulas, name), differentiable(*double))
        for ours, right in zip(found, exact, strict=True):
            assert (ours.double().cpu() - right).abs().max() <= 1e-5 * right.abs().max()


def model(x, weight, bias):
    """Both norms, and something for a compiler to fuse."""
    rows = ops.layer_norm(x.sin(), x.shape[-1:], weight, bias)[0]
    groups = ops.group_norm(rows * x, None, None, x.shape[0], x.shape[1], x.shape[2], 2)[0]
    return (groups * rows).tanh()


def gradients(function, args):
    """Return output and gradients."""
    leaves = differentiable(*args)
    output = function(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output).cumsum(0))


def test_compilation_and_export_without_a_graph_break():
    args = on_gpu((random(4, 6, 8), random(8), random(8, seed=1)))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, args), gradients(model, args), rtol=1e-4, atol=1e-4)
    module = normgrad.torch.GroupNorm(2, 6).cuda()
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, args[:1]), gradients(module, args[:1]), rtol=1e-4, atol=1e-5)
    exported = torch.export.export(module, args[:1])
    torch.testing.assert_close(exported.module()(args[0]), module(args[0]))


def test_a_captured_training_step_has_the_bits_of_an_eager_one():
    args = [leaf.requires_grad_() for leaf in on_gpu((random(64, 6, 512), random(512), random(512, seed=1)))]
    module = normgrad.torch.LayerNorm(512).cuda()

    def step():
        output = module(model(*args))
        leaves = [*args, *module.parameters()]
        return [output, *torch.autograd.grad(output, leaves, torch.ones_like(output).cumsum(0))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        args[0].copy_(random(64, 6, 512, seed=7))
    graph.replay()
    replayed = [result.clone() for result in results]
    assert all(map(torch.equal, replayed, step()))


def test_cuda_graphs_of_torch_compile():
    args = on_gpu((random(64, 6, 512), random(512), random(512, seed=1)))
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = [tensor.clone() for tensor in gradients(compiled, args)]
    torch.testing.assert_close(found, list(gradients(model, args)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("make", [lambda: torch.nn.GroupNorm(4, 16), lambda: torch.nn.LayerNorm([16, 8, 8])])
def test_override_is_as_near_to_float64_as_pytorch(make, dtype, order):
    norm, exact_norm = make().to("cuda", dtype), make().to("cuda", torch.float64)
    x = random(4, 16, 8, 8).to("cuda", dtype).contiguous(memory_format=order).requires_grad_()
    grad = random(4, 16, 8, 8, seed=1).to("cuda", dtype)

    def run(norm, x, grad):
        return torch.autograd.grad(norm(x), [x, *norm.parameters()], grad)

    theirs = run(norm, x, grad)
    with normgrad.torch.override():
        ours = run(norm, x, grad)
    after = run(norm, x, grad)
    exact = run(exact_norm, x.detach().double().requires_grad_(), grad.double())
    torch.testing.assert_close(after, theirs)
    for mine, their, right in zip(ours, theirs, exact, strict=True):
        keeps = isinstance(norm, torch.nn.GroupNorm) and dtype != torch.float64 and mine.dim() == 4
        assert mine.stride() == (x.stride() if keeps else their.stride())
        if dtype == torch.float64:
            assert torch.equal(mine, their)
            continue
        off, their_off = ((one.double() - right).abs().max() for one in (mine, their))
        # Ours have float32 statistics; what differs beside them is one rounding of the result.
        unit = max(torch.finfo(dtype).eps / 2, 1e-6) * right.abs().max()
        assert off <= their_off + unit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ours", "theirs", "sizes"),
    [
        (normgrad.torch.LayerNorm, torch.nn.LayerNorm, (8,)),
        (normgrad.torch.GroupNorm, torch.nn.GroupNorm, (2, 16)),
    ],
)
def test_modules_under_autocast_are_as_those_of_pytorch(ours, theirs, sizes, dtype):
    ours, theirs = ours(*sizes).cuda(), theirs(*sizes).cuda()
    x = random(4, 16, 8, 8).to("cuda", dtype).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = gradients(ours, [x]), gradients(theirs, [x])
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    if len(sizes) == 2:
        assert all(one.is_contiguous(memory_format=torch.channels_last) for one in found)
