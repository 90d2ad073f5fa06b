"""What a call costs the host on a GPU: ``python benchmarks/cuda_host.py``. Results are checked first.

For small and medium tensors, which the GPU has done before the host comes with the next: microseconds per call of
PyTorch's operator, of ours by every way there is, and of a plan, with the device left to catch up after each turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import normgrad
import normgrad.torch
from normgrad.cuda import backend as cuda
from normgrad.torch import library

ALL = [True, True, True]
ROUNDS, CALLS = 30, 100


def cases() -> dict[str, tuple[str, tuple[Any, ...], Callable[[], Any]]]:
    """An operator of ours, its arguments, and PyTorch's for the same, by what is called."""
    found: dict[str, tuple[str, tuple[Any, ...], Callable[[], Any]]] = {}
    aten = torch.ops.aten
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((2, 8), (128, 768), (2048, 1024)):
            x, grad = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
            weight, bias = (torch.randn(shape[1:], device="cuda", dtype=dtype) for _ in range(2))
            _, mean, rstd = aten.native_layer_norm(x, shape[1:], weight, bias, 1e-5)
            what = f"{shape[0]}×{shape[1]} {str(dtype).removeprefix('torch.')}"
            forward = (x, list(shape[1:]), weight, bias, 1e-5)
            backward = (grad, x, list(shape[1:]), mean, rstd, weight, bias, ALL)
            found[f"LayerNorm forward {what}"] = "layer_norm", forward, lambda c=forward: aten.native_layer_norm(*c)
            found[f"LayerNorm backward {what}"] = (
                "layer_norm_backward",
                backward,
                lambda c=backward: aten.native_layer_norm_backward(*c),
            )
    x, grad = (torch.randn(4, 32, 8, 8, device="cuda") for _ in range(2))
    weight = torch.randn(32, device="cuda")
    _, mean, rstd = aten.native_group_norm(x, weight, weight, 4, 32, 64, 8, 1e-5)
    groups = (grad, x, mean, rstd, weight, 4, 32, 64, 8, ALL)
    found["GroupNorm backward 4×32×8×8 float32"] = (
        "group_norm_backward",
        groups,
        lambda: aten.native_group_norm_backward(*groups),
    )
    return found


def check(name: str, args: tuple[Any, ...]) -> None:
    """The short way has the bits of the long one, and both are near to the CPU's."""
    operator = getattr(torch.ops.normgrad, name)
    first, again, plain = operator(*args), operator(*args), getattr(normgrad, name)(*args)
    on_cpu = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
    right = getattr(normgrad, name)(*on_cpu)
    torch.cuda.synchronize()
    for one, two, three, four in zip(first, again, plain, right, strict=True):
        assert torch.equal(one, two), name
        assert torch.equal(one, three), name
        torch.testing.assert_close(one.cpu(), four, rtol=2e-2, atol=2e-2)


def check_other_ways() -> None:
    """Launches one by one as Triton does them, data that is not aligned, and another stream give the same bits."""
    name, args, _ = cases()["LayerNorm backward 128×768 float32"]
    expected = getattr(normgrad, name)(*args)
    out = tuple(torch.empty_like(result) for result in expected)
    plan = getattr(normgrad, name).plan(*args, out=out)
    plan.repeatable = True
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    plan.run(stream=stream)
    stream.synchronize()
    assert all(map(torch.equal, out, expected))
    usual = cuda._driver_launches
    cuda._driver_launches = lambda *_: None
    try:
        plan = getattr(normgrad, name).plan(*args, out=tuple(result.zero_() for result in out))
        plan.run()
    finally:
        cuda._driver_launches = usual
    assert all(map(torch.equal, out, expected))
    grad, x, *rest = args
    for offset in (1, 4, 1):
        moved = torch.empty(x.numel() + offset, device="cuda")[offset:].view(x.shape).copy_(x)
        for found in (
            getattr(torch.ops.normgrad, name)(grad, moved, *rest),
            getattr(normgrad, name)(grad, moved, *rest),
        ):
            assert all(map(torch.equal, found, expected))


def ways(name: str, args: tuple[Any, ...], theirs: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """How the work can be asked for."""
    operator, public, run = getattr(torch.ops.normgrad, name), getattr(normgrad, name), library.RUN[name]
    out = tuple(torch.empty_like(result) for result in operator(*args))
    plan = public.plan(*args, out=out)
    plan.repeatable = True
    return {
        "PyTorch": theirs,
        "torch.ops.normgrad": lambda: operator(*args),
        "normgrad": lambda: public(*args),
        "module's way": lambda: run(*args),
        "plan.run": plan.run,
    }


def host_time(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds per call, the least of several turns."""
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for what, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            least[what] = min(least[what], (time.perf_counter() - start) / CALLS * 1e6)
    return least


def main() -> None:
    """Check, then print a table."""
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "normgrad", normgrad.__version__)
    check_other_ways()
    head: list[str] = []
    for what, (name, args, theirs) in cases().items():
        check(name, args)
        times = host_time(ways(name, args, theirs))
        if not head:
            head = ["µs of the host per call", *times]
            print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        print(f"| {what} | " + " | ".join(f"{time:.1f}" for time in times.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
