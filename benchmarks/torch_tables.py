"""How the thresholds of ``normgrad.torch`` are chosen: below which size PyTorch's norms are faster in a training step.

    python benchmarks/torch_tables.py [--device cuda] [--budget SECONDS]

Prints a table in Markdown: the forward pass of one norm, and both passes, by PyTorch and on normgrad's operators, with
float32 parameters. As in a training step, the operator before has just written the norm's operands, and everything
else has been evicted from the caches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from page_parts import table
from torch import Tensor
from torch.nn import functional

import normgrad.torch
from normgrad.bench.memory import keep_freed_memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELEMENTS = [1 << power for power in range(12, 24, 2)]
COLUMNS = (256, 1024, 4096)
CHANNELS, SIDES, GROUPS = 64, (8, 32), 32
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CACHES = 1 << 24  # float32 elements: 64 MB, more than the last-level cache of a CPU or a GPU's L2 cache
FEWEST = 12

Norm = Callable[..., Tensor]  # of input, weight and bias


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return LayerNorm over the last dimension on normgrad's operator."""
    return torch.ops.normgrad.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)[0]


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return GroupNorm of images on normgrad's operator."""
    N, C, H, W = x.shape
    return torch.ops.normgrad.group_norm(x, weight, bias, N, C, H * W, GROUPS, 1e-5)[0]


def cases(dtype: torch.dtype) -> Iterator[tuple[str, str, Tensor, Norm, Norm]]:
    """Yield a norm's name, the memory format, an input, PyTorch's function and ours."""
    for elements in ELEMENTS:
        for columns in COLUMNS:
            if elements >= columns:
                x = torch.randn(elements // columns, columns).to(dtype)
                theirs = partial(functional.layer_norm, normalized_shape=[columns])
                yield "LayerNorm", "", x, theirs, layer_norm
        for side in SIDES:
            shape = (elements // (CHANNELS * side * side), CHANNELS, side, side)
            if shape[0]:
                for name, order in FORMATS.items():
                    x = torch.randn(shape).to(dtype).contiguous(memory_format=order)
                    yield "GroupNorm", name, x, partial(functional.group_norm, num_groups=GROUPS), group_norm


class Step:
    """Times a norm's two passes."""

    def __init__(self, x: Tensor, channels: int) -> None:
        device = x.device
        self._x, self._grad, self._others = x.requires_grad_(), torch.randn_like(x), torch.ones(CACHES, device=device)
        # PyTorch's norms on a GPU take no float32 parameters beside 16-bit data.
        dtype = x.dtype if x.is_cuda else torch.float32
        self._parameters = [torch.randn(channels, device=device, dtype=dtype).requires_grad_() for _ in range(2)]

    def __call__(self, norm: Norm) -> tuple[float, float]:
        """Return the seconds of the forward pass, and of both."""
        self._others.add_(1.0)
        x = self._x * 1.0
        start = self._now()
        weight, bias = self._parameters
        y = norm(x, weight=weight, bias=bias)
        forward = self._now() - start
        self._others.add_(1.0)
        grad = self._grad * 1.0
        start = self._now()
        torch.autograd.grad(y, [x, *self._parameters], grad)
        return forward, forward + self._now() - start

    def _now(self) -> float:
        if self._x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--budget", type=float, default=0.3, help="seconds per row")
    options = parser.parse_args()
    keep_freed_memory()
    print(f"PyTorch {torch.__version__}, normgrad {normgrad.__version__}, {torch.get_num_threads()} threads\n")
    figures = [f"{what}{side}" for what in ("forward, ", "both, ") for side in ("PyTorch µs", "normgrad µs", "×")]
    print(table(["norm", "dtype", "size", "memory format", *figures], [], numbers=6), end="")
    for dtype in DTYPES:
        for name, order, x, theirs, ours in cases(dtype):
            step = Step(x.to(options.device), x.shape[-1 if name == "LayerNorm" else 1])
            times: list[tuple[float, ...]] = []
            end = time.perf_counter() + options.budget
            while time.perf_counter() < end or len(times) < FEWEST:
                times.append((*step(theirs), *step(ours)))
            forward, both, own_forward, own = (1e6 * statistics.median(t) for t in zip(*times[2:], strict=True))
            cells = [name, str(dtype)[6:], "×".join(map(str, x.shape)), order]
            for plain, mine in ((forward, own_forward), (both, own)):
                cells += [f"{plain:.0f}", f"{mine:.0f}", f"{plain / mine:.2f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
