"""torch.compile, torch.export and AOTAutograd over torch.ops.normgrad."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx

import normgrad.torch
from normgrad.testing.expected import as_tuple
from support.processes import run_python
from support.torch_samples import copied, differentiable, random, samples

ops = torch.ops.normgrad
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tuple_of(name: str) -> Any:
    def function(*args: Any) -> tuple[Any, ...]:
        return tuple(result for result in as_tuple(getattr(ops, name)(*args)) if result is not None)

    return function


def tensors_of(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def check_compiled(name: str, backend: str) -> None:
    """The same bits as in eager, the arguments changed in place included."""
    for args in samples()[name]:
        eager, ours = copied(args), copied(args)
        expected = tuple_of(name)(*eager)
        found = torch.compile(tuple_of(name), fullgraph=True, backend=backend)(*ours)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(tensors_of(ours), tensors_of(eager), rtol=0, atol=0)


@pytest.mark.parametrize("name", samples())
def test_compiled_in_one_graph(name: str) -> None:
    check_compiled(name, "aot_eager")


@needs_compiler
@pytest.mark.parametrize("name", ["batch_norm_gather_stats_with_counts", "batch_norm_reduce_backward"])
def test_compiled_by_inductor(name: str) -> None:
    check_compiled(name, "inductor")


def model(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    rows = ops.layer_norm(x.sin(), x.shape[-1:], weight, bias)[0]
    groups = ops.group_norm(rows * x, None, None, x.shape[0], x.shape[1], x.shape[2], 2)[0]
    return (groups * rows).tanh()


def gradients(function: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    leaves = differentiable(*args)
    output = function(*leaves)
    return output, *torch.autograd.grad(output, leaves, torch.ones_like(output).cumsum(0))


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [("aot_eager", False), ("aot_eager", True), pytest.param("inductor", False, marks=needs_compiler)],
)
def test_gradients_of_a_compiled_function(backend: str, dynamic: bool) -> None:
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (4, 6, 8) if dynamic else (4,):
        args = (random(rows, 6, 8), random(8), random(8, seed=1))
        torch.testing.assert_close(gradients(compiled, args), gradients(model, args))


def test_one_graph_serves_every_batch_size() -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=counting, dynamic=True)
    for rows in (3, 5, 7, 9):
        compiled(random(rows, 6, 8), random(8), random(8))
    assert len(graphs) == 1


def test_aot_autograd() -> None:
    targets = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    args = (random(4, 6, 8), random(8), random(8, seed=1))
    torch.testing.assert_close(gradients(aot_function(model, compiler), args), gradients(model, args))
    for op in (ops.layer_norm, ops.layer_norm_backward, ops.group_norm, ops.group_norm_backward):
        assert op.default in targets


class Model(torch.nn.Module):
    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return model(*args)


def test_export() -> None:
    args = (random(4, 6, 8), random(8), random(8, seed=1))
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(Model(), args, dynamic_shapes=(({0: batch}, None, None),))
    targets = [node.target for node in exported.graph.nodes]
    assert {ops.layer_norm.default, ops.group_norm.default} <= set(targets)
    larger = (random(7, 6, 8), *args[1:])
    for program in (exported, exported.run_decompositions()):
        torch.testing.assert_close(program.module()(*larger), model(*larger))


def test_symbolic_tracing() -> None:
    args = (random(4, 6, 8), random(8), random(8, seed=1))
    traced = make_fx(lambda *a: gradients(model, a), tracing_mode="symbolic")(*args)
    torch.testing.assert_close(traced(*args), gradients(model, args))


def test_a_transform_inside_a_compiled_function() -> None:
    def per_sample(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return ops.layer_norm(x, [8], weight, bias)[0].sin().sum()

        return torch.func.vmap(torch.func.grad(loss, (0, 1)), (0, None))(x, weight)

    args = (random(4, 6, 8), random(8), random(8, seed=1))
    torch.testing.assert_close(torch.compile(per_sample, backend="aot_eager")(*args), per_sample(*args))


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: lambda x: torch.func.jvp(f, (x,), (x.sin(),)),
        lambda f: lambda x: torch.func.jvp(torch.func.grad(lambda x: f(x).sin().sum()), (x,), (x.sin(),)),
        lambda f: torch.func.hessian(lambda x: f(x).sin().sum()),
    ],
    ids=["jvp", "jvp of grad", "hessian"],
)
def test_forward_mode_inside_a_compiled_function(transformed: Callable[..., Any]) -> None:
    """The compiler begins a level of forward mode without the functions of torch.autograd.forward_ad."""
    norm, x = normgrad.torch.LayerNorm(8, compiled="normgrad"), random(4, 8)
    function = transformed(lambda x: norm(x))
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))


_UNDER_DYNAMO = """
import sys, warnings
import torch
from torch import nn
import normgrad.torch
warnings.simplefilter("ignore")

def gradients(model, step):
    model.zero_grad()
    step()
    return [parameter.grad.clone() for parameter in model.parameters()]

def backward(loss):
    torch.compile(lambda loss: loss.backward(), backend="eager")(loss)

class Eager(nn.LayerNorm):
    forward = torch.compiler.disable(nn.LayerNorm.forward)

torch.manual_seed(0)
use = sys.argv[1]
if use == "step":
    model, x = nn.Sequential(nn.Linear(16, 32), Eager(32), nn.Linear(32, 4)), torch.randn(8, 16)
elif use == "override":
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GroupNorm(4, 16)), torch.randn(8, 8)
else:
    model, x = nn.Sequential(nn.Linear(64, 1024), nn.LayerNorm(1024)), torch.randn(2048, 64)
right = gradients(model, lambda: model(x).pow(3).mean().backward())
if use == "modules":
    model[1].__class__ = normgrad.torch.LayerNorm
    found = gradients(model, lambda: backward(model(x).pow(3).mean()))
else:
    step = torch.compile(lambda: model(x).pow(3).mean().backward(), backend="eager")
    with normgrad.torch.override():
        found = gradients(model, step if use == "step" else lambda: backward(model(x).pow(3).mean()))
for one, other in zip(found, right):
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
print("right")
"""


@pytest.mark.parametrize("use", ["modules", "override", "step"])
def test_backward_passes_that_run_under_dynamos_frame_hook(use: str, tmp_path: Path) -> None:
    """Kernels that are compiled there are none of Dynamo's business: it cannot trace Numba."""
    environment = {"NORMGRAD_CACHE_DIR": str(tmp_path)}
    assert run_python(f"import sys; sys.argv.append({use!r})" + _UNDER_DYNAMO, **environment) == "right\n"


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"), reason="this PyTorch has no such mark of frames"
)
@pytest.mark.parametrize("use", ["modules", "override"])
def test_dynamo_does_not_report_what_runs_under_its_frame_hook(use: str, small_tensors_are_ours: None) -> None:
    """The only graph break is the user's own: neither pass is traced, or warned of, where it runs beside the graph."""
    with normgrad.torch.override() if use == "override" else nullcontext() as override:
        norm = (normgrad.torch if use == "modules" else torch.nn).LayerNorm(8)
        model = torch.nn.Sequential(norm)
        if use == "override":  # Dynamo skips the frames of torch.nn's modules
            model.compile(backend="eager")
        output = model(random(4, 8).requires_grad_())
        assert output.grad_fn.name() == "NormgradLayerNormBackward"
        torch.compile(lambda loss: loss.backward(), backend="eager")(output.square().sum())
    assert override is None or override.report().taken == {"layer_norm": 1}
    assert norm.weight.grad is not None
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert len(breaks) == 1
    assert "Tensor.backward()" in next(iter(breaks))


@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm"])
def test_compiled_autograd_traces_eager_nodes_in_one_graph(name: str, small_tensors_are_ours: None) -> None:
    """The graph of a backward pass has the operator."""
    from torch._dynamo import compiled_autograd

    norm = normgrad.torch.LayerNorm([6, 5]) if name == "LayerNorm" else normgrad.torch.GroupNorm(3, 6)
    found, operators = [], set()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators.update(str(node.target) for node in graph.graph.nodes)
        return graph

    for compiled in (False, True):
        x = random(4, 6, 5).requires_grad_()
        loss = norm(x).sin().sum()
        assert norm(x).grad_fn.name() == f"Normgrad{name}Backward"
        norm.zero_grad()
        whole = torch.compile(backend=backend, fullgraph=True)
        with compiled_autograd._enable(whole) if compiled else nullcontext():
            loss.backward()
        found.append([x.grad, norm.weight.grad, norm.bias.grad])
    torch.testing.assert_close(*found)
    assert any("_norm_backward" in operator and "normgrad" in operator for operator in operators)
