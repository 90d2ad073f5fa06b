"""Everything of ``normgrad.torch`` on a GPU in one call: the checks, then the tables; status 1 if a check fails.

    python benchmarks/torch_on_gpu.py [--checks] [--device cpu]

``--checks`` leaves the tables out. With ``--device cpu`` the same checks run without a GPU, but for CUDA graphs.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_tables import TABLES, machine, table

import normgrad.torch
from normgrad.testing import compare, oracle, terms
from normgrad.torch import aten_override, formulas

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

import torch_override  # noqa: E402 - the example

from support.torch_samples import differentiable, random, samples, without_running_statistics  # noqa: E402

ops = torch.ops.normgrad
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Check = Callable[[str], None]


def on(device: str, values: Any) -> Any:
    """The tensors among the values on a device."""
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, values
    )


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Results as a tuple, even where there is one."""
    return results if isinstance(results, tuple) else (results,)


def wide(value: Any) -> Any:
    """What the oracle takes."""
    return value.double().cpu().numpy() if isinstance(value, torch.Tensor) else value


def operators_against_the_oracle(device: str) -> None:
    """Every result within the contract's bound, twice: checked in full and recalled."""
    for dtype in DTYPES:
        for name, calls in samples(dtype).items():
            names = [argument.name for argument in getattr(ops, name).default._schema.arguments]
            for args in calls:
                arguments = dict(zip(names, map(wide, args), strict=True))
                magnitudes = as_tuple(getattr(terms, name)(**arguments))
                expected = as_tuple(getattr(oracle, name)(**arguments))
                for _ in range(2):
                    found = as_tuple(getattr(ops, name)(*on(device, tuple(map(copied, args)))))
                    for result, right, size in zip(found, expected, magnitudes, strict=False):
                        if result is not None:
                            report = compare(result.cpu(), np.asarray(right), terms=size)
                            assert report.passed, f"{name} {dtype}: {report.text}"


def copied(arg: Any) -> Any:
    """A tensor of its own, since a call may change it."""
    return arg.clone() if isinstance(arg, torch.Tensor) else arg


def opcheck(device: str) -> None:
    """PyTorch's own checks of every operator."""
    for name, calls in samples().items():
        for args in calls:
            leaves = list(on(device, differentiable(*args)))
            if name == "batch_norm_gather_stats_with_counts":
                leaves[3:5] = on(device, args[3:5])
            leaves = [
                leaf.detach().requires_grad_() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf
                for leaf in leaves
            ]
            torch.library.opcheck(getattr(ops, name).default, tuple(leaves))


def scalar_of(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A number that depends on every result."""

    def scalar(*args: Any) -> torch.Tensor:
        results = [result for result in as_tuple(function(*args)) if result is not None]
        weights = [torch.linspace(-1, 2, result.numel()).reshape(result.shape).to(result) for result in results]
        parts = [(result / 16).sin().mul(weight).sum() for result, weight in zip(results, weights, strict=True)]
        return torch.stack(parts).sum()

    return scalar


def derivatives(device: str) -> None:
    """First and second derivatives of every operator against its formula in float64."""

    def twice(function: Callable[..., torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
        leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
        zeros = {"allow_unused": True, "materialize_grads": True}
        first = torch.autograd.grad(function(*args), leaves, create_graph=True, **zeros)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), leaves, **zeros)
        return [*first, *second]

    for name, calls in samples().items():
        for args in calls:
            args = without_running_statistics(name, args)
            single = tuple(on(device, args))
            double = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
            found = twice(scalar_of(getattr(ops, name)), differentiable(*single))
            exact = twice(scalar_of(getattr(formulas, name)), differentiable(*double))
            for mine, right in zip(found, exact, strict=True):
                assert (mine.double().cpu() - right).abs().max() <= 1e-5 * right.abs().max(), name


def model(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Both norms, and something for a compiler to fuse."""
    rows = ops.layer_norm(x.sin(), x.shape[-1:], weight, bias)[0]
    groups = ops.group_norm(rows * x, None, None, x.shape[0], x.shape[1], x.shape[2], 2)[0]
    return (groups * rows).tanh()


def gradients(function: Callable[..., torch.Tensor], args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Output and gradients."""
    leaves = differentiable(*args)
    output = function(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output).cumsum(0))


def compilation(device: str) -> None:
    """One graph, by inductor, with its gradients; exported too."""
    args = on(device, (random(4, 6, 8), random(8), random(8, seed=1)))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, args), gradients(model, args), rtol=1e-4, atol=1e-4)
    module = normgrad.torch.GroupNorm(2, 6).to(device)
    leaves = [args[0]]
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, leaves), gradients(module, leaves), rtol=1e-4, atol=1e-5)
    exported = torch.export.export(module, (args[0],))
    torch.testing.assert_close(exported.module()(args[0]), module(args[0]))


def cuda_graphs(device: str) -> None:
    """Operators and a module's training step, captured and replayed on new data: the bits of eager calls."""
    if device == "cpu":
        return
    args = [leaf.requires_grad_() for leaf in on(device, (random(64, 6, 512), random(512), random(512, seed=1)))]
    module = normgrad.torch.LayerNorm(512).to(device)

    def step() -> list[torch.Tensor]:
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
    for mine, right in zip(replayed, step(), strict=True):
        assert torch.equal(mine, right)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = [tensor.clone() for tensor in gradients(compiled, args)]
    torch.testing.assert_close(found, list(gradients(model, args)), rtol=1e-4, atol=1e-4)


def override_of_models(device: str) -> None:
    """Gradients as near to float64 as PyTorch's, in its layout; float64 to the bit; after it PyTorch's own bits."""
    for dtype in (*DTYPES, torch.float64):
        for order in (torch.contiguous_format, torch.channels_last):
            for norm in (torch.nn.GroupNorm(4, 16), torch.nn.LayerNorm([16, 8, 8])):
                norm = norm.to(device, dtype)
                x = random(4, 16, 8, 8).to(device, dtype).contiguous(memory_format=order).requires_grad_()
                grad = random(4, 16, 8, 8, seed=1).to(device, dtype)
                leaves = [x, *norm.parameters()]
                run = lambda n=norm, x=x, ls=leaves, g=grad: torch.autograd.grad(n(x), ls, g)  # noqa: E731
                plain = run()
                with normgrad.torch.override():
                    found = run()
                again = run()
                exact_norm = type(norm)(*([4, 16] if isinstance(norm, torch.nn.GroupNorm) else [[16, 8, 8]]))
                exact_norm = exact_norm.to(device, torch.float64)
                wide_x = x.detach().double().requires_grad_()
                exact = torch.autograd.grad(exact_norm(wide_x), [wide_x, *exact_norm.parameters()], grad.double())
                for mine, theirs, after, right in zip(found, plain, again, exact, strict=True):
                    keeps = isinstance(norm, torch.nn.GroupNorm) and dtype != torch.float64 and mine.dim() == 4
                    assert mine.stride() == (x.stride() if keeps else theirs.stride())
                    if dtype == torch.float64:
                        assert torch.equal(mine, theirs)
                    else:
                        off, their_off = ((one.double() - right).abs().max() for one in (mine, theirs))
                        # Ours have float32 statistics; what differs beside them is one rounding of the result.
                        unit = max(torch.finfo(dtype).eps / 2, 1e-6) * right.abs().max()
                        assert off <= their_off + unit, (dtype, order, norm)
                    torch.testing.assert_close(after, theirs)
    assert aten_override._in_force == 0


def modules(device: str) -> None:
    """As torch.nn's, by autocast too; channels_last stays."""
    for ours, theirs in (
        (normgrad.torch.LayerNorm(8), torch.nn.LayerNorm(8)),
        (normgrad.torch.GroupNorm(2, 16), torch.nn.GroupNorm(2, 16)),
    ):
        ours, theirs = ours.to(device), theirs.to(device)
        for dtype in DTYPES:
            x = random(4, 16, 8, 8).to(device, dtype).contiguous(memory_format=torch.channels_last)
            for cast in (False, True):
                if device == "cpu" and dtype == torch.float16 and cast:
                    continue
                if device == "cuda" and dtype != torch.float32 and not cast:
                    continue  # 16-bit data beside float32 weights, which PyTorch's own modules refuse there
                with torch.autocast(device, torch.bfloat16, enabled=cast):
                    found, expected = gradients(ours, [x]), gradients(theirs, [x])
                assert [one.dtype for one in found] == [one.dtype for one in expected]
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
                if isinstance(ours, torch.nn.GroupNorm):
                    assert found[0].is_contiguous(memory_format=torch.channels_last)
                    assert found[1].is_contiguous(memory_format=torch.channels_last)


def example(device: str) -> None:
    """The example's models train alike with and without the override."""
    options = argparse.Namespace(device=device, dtype="float32", steps=6, batch=4, size=32, channels_last=False)
    for make in (torch_override.UNet, torch_override.VisionTransformer):
        plain, ours = torch_override.train(make, options)
        worst = max(abs(a - b) / a for a, b in zip(plain.losses, ours.losses, strict=True))
        assert worst <= torch_override.TOLERANCE, (make.__name__, worst)


CHECKS: tuple[Check, ...] = (
    operators_against_the_oracle,
    opcheck,
    derivatives,
    modules,
    override_of_models,
    compilation,
    cuda_graphs,
    example,
)


def main() -> int:
    """Run the checks, then the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    options = parser.parse_args()
    print(machine(options.device), end="\n\n", flush=True)
    failed = 0
    for check in CHECKS:
        start = time.perf_counter()
        try:
            check(options.device)
            verdict = "passed"
        except Exception:
            traceback.print_exc()
            failed, verdict = failed + 1, "FAILED"
        print(f"{verdict}  {check.__name__}  {time.perf_counter() - start:.1f} s", flush=True)
    print()
    for name, (head, rows) in () if options.checks else TABLES.items():
        print(f"### {name}\n")
        table(head, rows(options.device, 0.2))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
