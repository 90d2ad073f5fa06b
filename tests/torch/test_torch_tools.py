"""Tools of PyTorch's on models with normgrad's modules: each sees every call, or sees PyTorch's own function."""

from __future__ import annotations

import copy
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import normgrad.torch
from normgrad.torch import functional, heuristics, internals
from support.processes import run_python
from support.torch_samples import random

pytestmark = [
    pytest.mark.usefixtures("small_tensors_are_ours"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # torch.nn's GroupNorm has it too
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]
F = torch.nn.functional


def model(**options: Any) -> torch.nn.Module:
    """Both norms, with parameters that are not ones and zeros."""
    norms = [normgrad.torch.LayerNorm(5, **options), normgrad.torch.GroupNorm(2, 4, **options)]
    with torch.no_grad():
        for seed, parameter in enumerate(parameter for norm in norms for parameter in norm.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed))
    return torch.nn.Sequential(norms[0], torch.nn.Tanh(), norms[1])


def images(samples: int = 3) -> torch.Tensor:
    return random(samples, 4, 6, 5)


def gradients(function: Any, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().clone().requires_grad_()
    output = function(leaf)
    return [output.detach(), *torch.autograd.grad(output.sin().sum(), leaf)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def targets_of(graph: torch.fx.GraphModule) -> set[Any]:
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


# torch.compile and torch.export


class Captured:
    """A backend of ``torch.compile`` that keeps the graphs, before and after autograd has been traced."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    @property
    def targets(self) -> set[Any]:
        return set().union(*map(targets_of, self.graphs))


OURS = {torch.ops.normgrad.layer_norm, torch.ops.normgrad.group_norm}
THEIRS = {F.layer_norm, F.group_norm}


@pytest.mark.parametrize("compiled", ["auto", "normgrad"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(compiled: Any, dynamic: bool) -> None:
    captured, ours = Captured(), model(compiled=compiled)
    function = torch.compile(ours, backend=captured, fullgraph=True, dynamic=dynamic)
    for samples in (3, 7):
        torch.testing.assert_close(gradients(function, images(samples)), gradients(ours, images(samples)))
    found = captured.targets & (OURS | THEIRS)
    assert found == (THEIRS if compiled == "auto" else OURS)
    assert len(captured.graphs) == (1 if dynamic else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_compiled_with_our_operators_has_the_bits_of_eager_mode(dtype: torch.dtype) -> None:
    ours = model(compiled="normgrad").to(dtype)
    with pytest.MonkeyPatch.context() as patch:  # both forward passes are ours, as the operators are
        patch.setattr(heuristics, "takes_layer_norm_forward", lambda *_: True)
        patch.setattr(heuristics, "takes_group_norm_forward", lambda *_: True)
        expected = gradients(ours, images().to(dtype))
    found = gradients(torch.compile(ours, backend="aot_eager", fullgraph=True), images().to(dtype))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_long_rows_on_cuda_stay_our_operator() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for columns, is_ours in ((8191, False), (8192, True)):
            on_gpu = torch.empty(4, columns, device="cuda")
            assert heuristics.compiles_to_layer_norm(on_gpu, [columns]) is is_ours
    assert not heuristics.compiles_to_layer_norm(torch.empty(2, 10000), [10000])


def test_long_rows_that_autocast_would_convert_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    with FakeTensorMode():
        for dtype, is_ours in ((torch.float32, True), (torch.bfloat16, False), (torch.float16, False)):
            on_gpu = torch.empty(4, 10000, device="cuda", dtype=dtype)
            assert heuristics.compiles_to_layer_norm(on_gpu, [10000]) is is_ours


def test_what_cannot_be_ours_is_pytorchs_under_compile_too() -> None:
    captured = Captured()
    torch.compile(model(compiled="normgrad").double(), backend=captured, fullgraph=True)(images().double())
    assert captured.targets & (OURS | THEIRS) == THEIRS


def test_exported_programs_need_no_normgrad(tmp_path: Path) -> None:
    x, batch = images(), torch.export.Dim("batch", min=2)
    for strict in (False, True):
        exported = torch.export.export(model(), (x,), dynamic_shapes=({0: batch},), strict=strict)
        assert {torch.ops.aten.layer_norm.default, torch.ops.aten.group_norm.default} <= targets_of(exported)
        torch.testing.assert_close(exported.module()(images(5)), model()(images(5)))
    torch.export.save(exported, tmp_path / "model.pt2")
    torch.save((images(5), model()(images(5))), tmp_path / "expected.pt")
    code = f"""
import sys, warnings
warnings.simplefilter("ignore")
import torch
x, expected = torch.load({str(tmp_path / "expected.pt")!r})
torch.testing.assert_close(torch.export.load({str(tmp_path / "model.pt2")!r}).module()(x), expected)
print("normgrad" in sys.modules)
"""
    assert run_python(code) == "False\n"


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_with_our_operators(strict: bool) -> None:
    batch = torch.export.Dim("batch", min=2)
    ours = model(compiled="normgrad")
    exported = torch.export.export(ours, (images(),), dynamic_shapes=({0: batch},), strict=strict)
    found = {str(target) for target in targets_of(exported)}
    assert {"normgrad.layer_norm.default", "normgrad.group_norm.default"} <= found
    assert not found & {"aten.layer_norm.default", "aten.group_norm.default"}
    torch.testing.assert_close(exported.module()(images(5)), ours(images(5)))


@pytest.mark.parametrize("compiled", ["auto", "normgrad"])
def test_compiled_with_a_batch_that_depends_on_data(compiled: Any) -> None:
    ours, captured = model(compiled=compiled), Captured()
    function = torch.compile(lambda x, kept: ours(x[kept]), backend=captured, fullgraph=True)
    x, kept = images(5), torch.tensor([True, False, True, True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(function(x, kept), ours(x[kept]))
    assert captured.targets & (OURS | THEIRS) == (THEIRS if compiled == "auto" else OURS)


def test_the_argument_is_shown_kept_and_checked() -> None:
    norm = normgrad.torch.LayerNorm(4, compiled="normgrad")
    assert repr(norm).endswith("compiled='normgrad')")
    assert repr(normgrad.torch.GroupNorm(2, 4, compiled="normgrad")).endswith("compiled='normgrad')")
    assert "compiled" not in repr(normgrad.torch.LayerNorm(4))
    assert copy.deepcopy(norm).compiled == "normgrad"
    for make in (lambda **a: normgrad.torch.LayerNorm(4, **a), lambda **a: normgrad.torch.GroupNorm(2, 4, **a)):
        with pytest.raises(ValueError, match="compiled is 'pytorch', and must be 'auto' or 'normgrad'"):
            make(compiled="pytorch")


def test_replace_norms_sets_and_keeps_the_argument() -> None:
    mixed = torch.nn.Sequential(torch.nn.LayerNorm(4), normgrad.torch.LayerNorm(4), torch.nn.GroupNorm(2, 4))
    done = normgrad.torch.replace_norms(mixed, compiled="normgrad")
    assert [norm.compiled for norm in mixed] == ["normgrad", "auto", "normgrad"]
    again = normgrad.torch.replace_norms(mixed)
    assert not again
    assert mixed[0].compiled == "normgrad"
    done.undo()
    assert repr(mixed[0]) == repr(torch.nn.LayerNorm(4))
    assert not hasattr(mixed[0], "compiled")
    plain = torch.nn.LayerNorm(4)
    with pytest.raises(ValueError, match="compiled is"):
        normgrad.torch.replace_norms(plain, compiled="both")
    assert type(plain) is torch.nn.LayerNorm


# Tracers


def test_fx_symbolic_trace() -> None:
    ours = model()
    traced = torch.fx.symbolic_trace(ours)
    assert targets_of(traced) >= THEIRS
    torch.testing.assert_close(gradients(traced, images()), gradients(ours, images()))


@pytest.mark.parametrize("save", [False, True])
def test_jit_trace(save: bool) -> None:
    ours = model()
    traced = torch.jit.trace(ours, images())
    graph = str(traced.inlined_graph)
    assert "aten::layer_norm" in graph
    assert "aten::group_norm" in graph
    if save:
        buffer = io.BytesIO()
        torch.jit.save(traced, buffer)
        buffer.seek(0)
        traced = torch.jit.load(buffer)
    torch.testing.assert_close(gradients(traced, images()), gradients(ours, images()))


def test_jit_script() -> None:
    ours = model()
    torch.testing.assert_close(gradients(torch.jit.script(ours), images()), gradients(ours, images()))


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="onnxscript is not installed")
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.filterwarnings("ignore")  # the exporters' own
def test_onnx(dynamo: bool) -> None:
    exported = io.BytesIO()
    torch.onnx.export(model().eval(), (images(),), exported, dynamo=dynamo)
    assert exported.tell() > 0


def test_onnx_sees_pytorchs_operators() -> None:
    """What the exporter starts from: an exported program without operators that ONNX does not know."""
    exported = torch.export.export(model(), (images(),)).run_decompositions()
    assert not [target for target in targets_of(exported) if "normgrad" in str(target)]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_of_a_transform(mode: str) -> None:
    ours = model()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: ours(x).sin().sum())(x)

    traced = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(images())
    found = {str(target) for target in targets_of(traced)}
    assert {"normgrad.layer_norm.default", "normgrad.group_norm_backward.default"} <= found
    torch.testing.assert_close(traced(images()), function(images()))


def test_functionalize() -> None:
    ours = model()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.mul_(2)
        return ours(y)

    torch.testing.assert_close(torch.func.functionalize(function)(images()), function(images()))
    traced = make_fx(torch.func.functionalize(function))(images())
    assert torch.ops.normgrad.layer_norm.default in targets_of(traced)
    assert not [target for target in targets_of(traced) if "mul_" in str(target)]


def test_anomaly_mode() -> None:
    ours = model()
    with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"):
        anomalies = torch.autograd.detect_anomaly(check_nan=True)
    with anomalies:
        output = ours(images().requires_grad_())
        grad = torch.full_like(output, float("nan"))
        with (
            pytest.warns(UserWarning, match="Error detected in NormgradGroupNormBackward"),
            pytest.raises(RuntimeError, match="NormgradGroupNormBackward' returned nan values"),
        ):
            output.backward(grad)


def test_the_profiler() -> None:
    ours = model()
    with torch.profiler.profile() as profile:
        ours(images().requires_grad_()).sum().backward()
    names = {event.name for event in profile.events()}
    for norm in ("LayerNorm", "GroupNorm"):
        assert {f"Normgrad{norm}", f"Normgrad{norm}Backward"} <= names


def test_a_mode_of_torch_functions() -> None:
    seen: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    ours = model()
    with Watch():
        ours(images())
    assert [name for name in seen if "normgrad" in name and "layer_norm" in name]
    assert [name for name in seen if "normgrad" in name and "group_norm" in name]


def test_a_default_device_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        norms = [normgrad.torch.LayerNorm(5), normgrad.torch.GroupNorm(2, 4)]
        return [norm(images().requires_grad_()).grad_fn.name() for norm in norms]

    with torch.device("cpu"):
        assert names() == ["NormgradLayerNormBackward", "NormgradGroupNormBackward"]
        monkeypatch.setattr(heuristics, "MIN_FLOAT32", 1 << 20)
        assert names() == ["NativeLayerNormBackward0", "NativeGroupNormBackward0"]


# Tensors that are not plain


def test_subclasses_and_nested_tensors_are_pytorchs() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    norm = normgrad.torch.LayerNorm(5)
    plain = torch.nn.LayerNorm(5)
    both = norm(TwoTensor(images(), images() + 1))
    torch.testing.assert_close(both.b, plain(images() + 1))
    for layout in (torch.strided, torch.jagged):
        parts = [random(2, 5), random(3, 5)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # strided nested tensors are a prototype
            nested = torch.nested.nested_tensor(parts, layout=layout)
        for found, part in zip(norm(nested).unbind(), parts, strict=True):
            torch.testing.assert_close(found, plain(part))


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy at an address that is no multiple of the element size."""
    memory = bytearray(tensor.nbytes + 1)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=1).view(tensor.shape)
    assert copy.data_ptr() % copy.element_size()
    return copy.copy_(tensor)


def twice_differentiated(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(norm(leaf).sin().sum(), leaf, create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaf)[0]


CALLS_OF_MISALIGNED_MEMORY: dict[str, Callable[[torch.nn.Module, torch.Tensor], Any]] = {
    "gradient": lambda norm, x: torch.autograd.grad(norm(leaf := x.detach().requires_grad_()).sin().sum(), leaf),
    "gradient at such an address": lambda norm, x: torch.func.vjp(norm, x.clone())[1](x),
    "vjp": lambda norm, x: torch.func.vjp(norm, x)[1](x.clone()),
    "jvp": lambda norm, x: torch.func.jvp(norm, (x,), (x,)),
    "vmap": lambda norm, x: torch.vmap(norm)(x[None]),
    "vmap of grad": lambda norm, x: torch.vmap(torch.func.grad(lambda x: norm(x).sin().sum()))(x[None]),
    "second derivative": twice_differentiated,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("call", CALLS_OF_MISALIGNED_MEMORY.values(), ids=list(CALLS_OF_MISALIGNED_MEMORY))
def test_misaligned_memory(call: Callable[[torch.nn.Module, torch.Tensor], Any], dtype: torch.dtype) -> None:
    """PyTorch takes memory of torch.frombuffer at any offset."""
    x = random(6, 4, 5).to(dtype)
    for norm in (normgrad.torch.LayerNorm(5), normgrad.torch.GroupNorm(2, 4)):
        norm.to(dtype)
        torch.testing.assert_close(call(norm, misaligned(x)), call(norm, x))


def test_tangents_that_begin_after_the_forward_pass() -> None:
    """A dual gradient that reaches an eager node keeps its tangent."""
    from torch.autograd import forward_ad

    ours, theirs = normgrad.torch.LayerNorm(5), torch.nn.LayerNorm(5)
    grad, tangent = random(3, 5), random(3, 5, seed=1)
    found = []
    for norm in (ours, theirs):
        x = random(3, 5, seed=2).requires_grad_()
        output = norm(x)
        with forward_ad.dual_level():
            (result,) = torch.autograd.grad(output, x, forward_ad.make_dual(grad, tangent))
            found.append(forward_ad.unpack_dual(result).tangent)
    assert found[0] is not None
    torch.testing.assert_close(*found)


# PyTorch's internals

PRIVATE = ["_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_is_torch_function_mode_enabled"]


@pytest.mark.parametrize(
    "name", [*PRIVATE, "_is_tracing", "_functorch", "_ExcludeDispatchKeyGuard", "_AutoDispatchBelowAutograd", "_dynamo"]
)
def test_without_a_private_function_of_pytorchs(name: str) -> None:
    """Slower, or with PyTorch's public way, and the same results."""
    code = f"""
import warnings
warnings.simplefilter("ignore")
import torch
import torch._dynamo
assert hasattr(torch._C, {name!r})

class Without:
    def __getattr__(self, key):
        if key == {name!r}:
            raise AttributeError(key)
        return getattr(whole, key)

whole = torch._C
torch._C = Without()
import normgrad.torch
torch._C = whole
from normgrad.torch import heuristics
heuristics.MIN_FLOAT32 = 0
torch.manual_seed(0)
x = torch.randn(4, 6, 8)
for ours, theirs in (
    (normgrad.torch.LayerNorm(8), torch.nn.LayerNorm(8)),
    (normgrad.torch.GroupNorm(3, 6), torch.nn.GroupNorm(3, 6)),
    (lambda x: torch.ops.normgrad.layer_norm(x, [8])[0], lambda x: torch.nn.functional.layer_norm(x, [8])),
):
    found = []
    for norm in (ours, theirs):
        leaf = x.clone().requires_grad_()
        output = norm(leaf)
        (first,) = torch.autograd.grad(output.sin().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        batched = None
        if {name!r} != "_AutoDispatchBelowAutograd":  # torch.library's operators have no torch.func.grad
            batched = torch.vmap(torch.func.grad(lambda x: norm(x[None]).sin().sum()))(x)
        found.append((output, first, second, batched))
    assert "ormgrad" in ours(leaf).grad_fn.name(), ours(leaf).grad_fn
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
with normgrad.torch.override() as override:
    torch.nn.functional.layer_norm(x, [8])
print("right")
"""
    assert run_python(code) == "right\n"


def test_the_import_does_not_load_dynamo() -> None:
    """Which takes longer than all of normgrad."""
    assert run_python("import sys, normgrad.torch; print('torch._dynamo' in sys.modules)") == "False\n"


def test_the_mark_of_constants_is_pytorchs() -> None:
    def one() -> None: ...

    def other() -> None: ...

    assert vars(internals.constant_when_compiled(one)) == vars(torch.compiler.assume_constant_result(other)) != {}


def test_a_constant_in_a_compiled_function() -> None:
    @internals.constant_when_compiled
    def opaque() -> str:
        return importlib.util.find_spec("torch").name  # type: ignore[union-attr]

    compiled = torch.compile(lambda x: x + len(opaque()), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())) == len("torch")


def test_a_library_that_cannot_be_unregistered() -> None:
    class Library:
        pass

    library: Any = Library()
    assert not internals.unregister(library, [torch.ops.aten.layer_norm.default], ["CPU"])


class Passing(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [lambda: FlopCounterMode(display=False), Passing])
@pytest.mark.parametrize("watched", ["forward", "backward"])
def test_a_mode_in_one_pass_of_a_checkpointed_model(mode: Callable[[], Any], watched: str) -> None:
    """The pass that runs the model again saves tensors of the same shapes, whether a mode watches it or not."""
    both, x = model(), images().requires_grad_()
    _, expected = gradients(both, x)
    with mode() if watched == "forward" else nullcontext():
        output = checkpoint(both, x, use_reentrant=False)
    with mode() if watched == "backward" else nullcontext():
        output.sin().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_the_eager_path_asks_nothing_of_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager call is one node of autograd's graph and no operator."""
    monkeypatch.setattr(heuristics, "takes_layer_norm_forward", lambda *_: True)
    norm, x = normgrad.torch.LayerNorm(5), images().requires_grad_()
    norm(x).sum().backward()
    with torch.profiler.profile() as profile:
        norm(x)
    names = {event.name for event in profile.events()}
    assert not [name for name in names if name.startswith(("normgrad::", "aten::native_"))]


def test_autocast_on_cuda_is_registered_and_leaves_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(4, 8, dtype=torch.bfloat16)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    with torch.autocast("cuda", torch.float16):
        assert torch.ops.normgrad.layer_norm(x, [8])[0].dtype == torch.bfloat16
        assert not functional._is_autocast(x)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.autocast("cuda", torch.float16):
        on_gpu = torch.empty(4, 8, 3, device="cuda", dtype=torch.bfloat16)
        assert torch.ops.normgrad.layer_norm(on_gpu, [3])[0].dtype == torch.float32
        assert torch.ops.normgrad.group_norm(on_gpu, None, None, 4, 8, 3, 2)[0].dtype == torch.float32
        assert functional._is_autocast(on_gpu)
