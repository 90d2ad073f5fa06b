"""normgrad.torch on a GPU: the modules, override(), autocast and torch.compile, against torch.nn in float64."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import normgrad.torch
from normgrad.torch import heuristics
from support.torch_samples import random

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = [torch.contiguous_format, torch.channels_last]
MAKERS = {
    "LayerNorm": lambda library, **options: library.LayerNorm([16, 8, 8], **options),
    "rows": lambda library, **options: library.LayerNorm(8, **options),
    "GroupNorm": lambda library, **options: library.GroupNorm(4, 16, **options),
}
every_norm = pytest.mark.parametrize("norm", MAKERS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_format = pytest.mark.parametrize("memory_format", FORMATS, ids=str)


def images(dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    return random(4, 16, 8, 8).to("cuda", dtype).contiguous(memory_format=memory_format)


def results(module: torch.nn.Module, x: torch.Tensor, rounded: torch.dtype | None = None) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of the parameters, for a gradient that a dtype can hold."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = module(leaf)
    grad_out = torch.linspace(-1, 1, output.numel(), device="cuda", dtype=torch.float64).reshape(output.shape)
    grad_out = grad_out.to(rounded or x.dtype).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [leaf, *module.parameters()], grad_out)]


def module_of(norm: str, library: Any, dtype: torch.dtype = torch.float32, **options: Any) -> torch.nn.Module:
    module = MAKERS[norm](library, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed))
    return module.to("cuda", dtype)


def assert_near(found: list[torch.Tensor], module: torch.nn.Module, x: torch.Tensor) -> None:
    """One rounding to the result's dtype, and what float32 rounds between."""
    exact = results(copy.deepcopy(module).double(), x.double(), x.dtype)
    for mine, right in zip(found, exact, strict=True):
        unit = torch.finfo(mine.dtype).eps
        assert ((mine.double() - right).abs() <= unit * right.abs() + 4e-6 * right.abs().max()).all()


@every_norm
@every_dtype
@every_format
def test_override(norm: str, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    module, x = module_of(norm, torch.nn, dtype), images(dtype, memory_format)
    plain = results(module, x)
    with normgrad.torch.override() as override:
        found = results(module, x)
    assert sum(override.report().taken.values()) == 1
    assert not override.report().left
    assert_near(found, module, x)
    assert [one.dtype for one in found] == [one.dtype for one in plain]
    for one in found[:2]:
        assert one.stride() == (x if norm == "GroupNorm" else x.contiguous()).stride()
    torch.testing.assert_close(results(module, x), plain)


@every_norm
@every_format
@pytest.mark.parametrize("use", ["override", "modules"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(norm: str, use: str, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """PyTorch's dtypes, and no float32 copy of 16-bit data: the node follows the input at once."""
    plain, x = module_of(norm, torch.nn), images(dtype, memory_format)
    module = plain if use == "override" else module_of(norm, normgrad.torch)
    with torch.autocast("cuda", torch.bfloat16):
        expected = results(plain, x)
        if use == "override":
            with normgrad.torch.override() as override:
                found = results(module, x)
                output = module(x.clone(memory_format=torch.preserve_format).requires_grad_())
            assert sum(override.report().taken.values()) == 2
        else:
            found = results(module, x)
            output = module(x.clone(memory_format=torch.preserve_format).requires_grad_())
    node = output.grad_fn
    assert type(node).__name__.startswith("Normgrad")
    assert type(node.next_functions[0][0]).__name__ == "AccumulateGrad"
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert_near(found, plain, x)


def test_float64_and_autocast_after_the_override_are_pytorchs() -> None:
    module, x = module_of("GroupNorm", torch.nn, torch.float64), images(torch.float64)
    plain = results(module, x)
    with normgrad.torch.override() as override:
        found = results(module, x)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    assert list(override.report().left) == ["group_norm"]
    with torch.autocast("cuda", torch.bfloat16):
        output = module_of("GroupNorm", torch.nn)(images(torch.bfloat16))
    assert output.dtype == torch.float32


@every_norm
def test_inference_mode_keeps_the_memory_format(norm: str) -> None:
    module, x = module_of(norm, torch.nn), images(torch.float32, torch.channels_last)
    with torch.inference_mode(), normgrad.torch.override() as override:
        output = module(x)
    assert sum(override.report().taken.values()) == 1
    assert output.is_contiguous(memory_format=torch.channels_last) == (norm == "GroupNorm")


def test_a_profile_shows_the_names() -> None:
    module, x = module_of("GroupNorm", torch.nn), images(torch.float32).requires_grad_()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with normgrad.torch.override(), torch.profiler.profile(activities=activities) as profile:
        module(x).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"NormgradGroupNorm", "NormgradGroupNormBackward"} <= names


@pytest.mark.parametrize("compiled", ["auto", "normgrad"])
@pytest.mark.parametrize("columns", [512, 8192])
def test_compiled_rows(columns: int, compiled: Any) -> None:
    """Long rows stay our operator."""
    seen: set[str] = set()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    module = normgrad.torch.LayerNorm(columns, compiled=compiled).cuda()
    x = random(8, columns).cuda()
    function = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(results(function, x), results(module, x), rtol=1e-4, atol=1e-4)
    ours = compiled == "normgrad" or columns >= 8192
    assert any("normgrad" in target for target in seen) == ours


def test_a_captured_step() -> None:
    """A CUDA graph of a step with the override, captured after a first step has compiled the kernels."""
    module, x = module_of("GroupNorm", torch.nn), images(torch.float32, torch.channels_last)
    with normgrad.torch.override():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                results(module, x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results(module, x)
    x.copy_(images(torch.float32).flip(0))
    graph.replay()
    assert_near(captured, module, x)


@every_norm
@pytest.mark.parametrize("how", ["module", "override", "left to PyTorch"])
def test_outputs_of_16_bits_under_autocast(norm: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(torch.float32).requires_grad_()
    override: Any = nullcontext()
    if how == "module":
        module = module_of(norm, normgrad.torch, autocast_dtype=torch.bfloat16)
    else:
        module, override = module_of(norm, torch.nn), normgrad.torch.override(autocast_dtype=torch.bfloat16)
    if how == "left to PyTorch":
        monkeypatch.setattr(heuristics, "MIN_CUDA", 1 << 40)
    with override, torch.autocast("cuda", torch.bfloat16):
        output = module(x)
    assert output.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(output, x, torch.ones_like(output).cumsum(0))
    assert grad.dtype == torch.float32
    expected = module(x)
    assert expected.dtype == torch.float32
    assert ((output.float() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
