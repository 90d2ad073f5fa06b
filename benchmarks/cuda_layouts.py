"""On the GPU against the oracle: masks, strides, graphs, streams, gathered statistics, and numbers of special kinds.

The status is 1 if something is wrong.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda_cases import expected

import normgrad
from normgrad.testing import compare, oracle, terms

Problems = list[str]


def at_a_time(check: Callable[[Any], Problems], cases: Sequence[Any]) -> Problems:
    """What a check says of every case, in a process each: there are many kernels to compile."""
    with multiprocessing.get_context("spawn").Pool(len(cases)) as pool:
        return list(itertools.chain.from_iterable(pool.map(check, cases, chunksize=1)))


def in_both_orders(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers with a channel's places side by side, and with a place's channels."""
    return x, x.transpose(1, 2).contiguous().transpose(1, 2)


def judged(operator: str, arguments: tuple[Any, ...], label: str, out: tuple[Any, ...] | None = None) -> Problems:
    """A plain call against the oracle."""
    right = expected(operator, arguments)  # first, since the call may write into its arguments
    results = getattr(normgrad, operator)(*arguments, out=out)
    torch.cuda.synchronize()
    results = results if isinstance(results, tuple) else (results,)
    found = []
    for place, (result, exact, size) in enumerate(zip(results, *right, strict=False)):
        if result is not None:
            report = compare(result.cpu(), exact, size)
            if not report:
                found.append(f"{label}, output {place}: {report.text}")
    return found


def masks_and_strides() -> Problems:
    """LayerNorm backward on rows that one program holds and on rows that several share, on a stream and in a graph."""
    found = []
    for M, N in ((37, 300), (20, 20000)):
        dy, x = (torch.randn(M, 2 * N, device="cuda")[:, ::2], torch.randn(M, N + 3, device="cuda")[:, 3:])
        mean, rstd, weight = (
            torch.randn(M, 1, device="cuda"),
            torch.rand(M, 1, device="cuda") + 0.5,
            torch.randn(N, device="cuda"),
        )
        host = [tensor.cpu().numpy() for tensor in (dy, x, mean, rstd, weight)]
        for mask in itertools.product((False, True), repeat=3):
            given = (*host[:2], [N], *host[2:], None, mask)
            exact, sizes = oracle.layer_norm_backward(*given), terms.layer_norm_backward(*given)
            out = tuple(
                torch.full(s, torch.nan, device="cuda") if m else None
                for s, m in zip(((M, N), (N,), (N,)), mask, strict=True)
            )
            plan = normgrad.layer_norm_backward.plan(dy, x, [N], mean, rstd, weight, None, mask, out=out)
            plan.repeatable = True
            work = torch.full((plan.workspace_size + 1,), 255, dtype=torch.uint8, device="cuda")
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            plan.run(workspace=work, stream=stream)
            torch.cuda.synchronize()
            once = [None if tensor is None else tensor.clone() for tensor in out]
            if any(mask):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    plan.run(workspace=work)
                for tensor in filter(lambda t: t is not None, out):
                    tensor.fill_(torch.nan)
                graph.replay()
                torch.cuda.synchronize()
            for first, result, value, size in zip(once, out, exact, sizes, strict=True):
                if result is None:
                    continue
                report = compare(result.cpu(), value, size)
                if not report or not torch.equal(first, result):
                    found.append(f"{M}×{N} {mask}: {report.text}")
    return found


def shared_work() -> list[tuple[str, tuple[Any, ...]]]:
    """Calls whose programs wait for each other: rows and groups that none holds alone."""
    M, N = 64, 40000
    groups = (6, 384, 3600, 32)

    def data(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    found: list[tuple[str, tuple[Any, ...]]] = []
    for _ in range(4):
        rows = torch.zeros(M, 1, device="cuda"), torch.ones(M, 1, device="cuda")
        statistics = torch.zeros(6, 32, device="cuda"), torch.ones(6, 32, device="cuda")
        x, dy = data(*groups[:3]), data(*groups[:3])
        found += [
            ("layer_norm_backward", (data(M, N), data(M, N), [N], *rows)),
            ("group_norm_backward", (dy, x, *statistics, None, *groups)),
            ("group_norm", (x, None, None, *groups)),
        ]
    return found


def streams() -> Problems:
    """Calls on several streams at once, whose programs wait for each other, give what they give alone."""
    calls = [(getattr(normgrad, operator), given) for operator, given in shared_work()]
    alone = [operator(*given) for operator, given in calls]
    torch.cuda.synchronize()
    used = [torch.cuda.Stream(priority=-(place % 2)) for place in range(len(calls))]
    together: list[Any] = [None] * len(calls)
    for _ in range(20):
        for place, (stream, (operator, given)) in enumerate(zip(used, calls, strict=True)):
            with torch.cuda.stream(stream):
                together[place] = operator(*given)
    torch.cuda.synchronize()
    return [
        f"stream {place}: not the bits of a call alone"
        for place, (a, b) in enumerate(zip(alone, together, strict=True))
        if not all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
    ]


def gathered() -> Problems:
    """The statistics of all ranks, with running ones, from few and many ranks; one of them without a count."""
    found = []
    for ranks, C in ((1, 5), (8, 1000), (300, 33)):
        x = torch.zeros(1, C, device="cuda")
        mean, invstd = torch.randn(ranks, C, device="cuda"), torch.rand(ranks, C, device="cuda") + 0.5
        counts = torch.randint(0, 50, (ranks,), device="cuda", dtype=torch.int32) + (ranks == 1)
        for running in (None, torch.rand(C, device="cuda")):
            also = None if running is None else running + 0.5
            arguments = (x, mean, invstd, running, also, 0.1, 1e-5, counts)
            found += judged("batch_norm_gather_stats_with_counts", arguments, f"gather {ranks}×{C}")
    return found


def special_values_of(case: tuple[tuple[int, int, int], torch.dtype]) -> Problems:
    """NaN, Inf and zeros among the data go where the formula sends them."""
    shape, dtype = case
    found: Problems = []
    generator = torch.Generator("cuda").manual_seed(1)
    x, dy = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(2))
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0], device="cuda", dtype=dtype)
    x[0, 1, :4], x[1, 2, 0], dy[2, 3, :3] = odd, torch.inf, odd[:3]
    N, C, P = shape
    v = torch.rand(C, device="cuda", generator=generator) + 0.5
    groups = torch.rand(N, 4, device="cuda", generator=generator) + 0.5
    rows = torch.rand(N * C, 1, device="cuda", generator=generator) + 0.5
    flat = (dy.reshape(-1, P), x.reshape(-1, P))
    label = f"special {dtype} {shape}"
    found += judged("batch_norm_stats", (x,), label + " stats")
    found += judged("batch_norm_reduce_backward", (dy, x, v, v, v), label + " reduce")
    found += judged("layer_norm_backward", (*flat, [P], rows, rows), label + " rows")
    found += judged("layer_norm", (flat[1], [P]), label + " forward")
    for order in in_both_orders(x):
        found += judged("group_norm_backward", (dy, order, groups, groups, None, *shape, 4), label + " groups")
        found += judged("group_norm", (order, None, None, *shape, 4), label + " groups forward")
    return found


def special_values() -> Problems:
    """The same of several sizes and dtypes at a time."""
    shapes, dtypes = ((6, 40, 100), (6, 8, 49), (4, 8, 9000)), (torch.float32, torch.float16, torch.bfloat16)
    return at_a_time(special_values_of, [(shape, dtype) for shape in shapes for dtype in dtypes])


def near_zero_of(case: tuple[int, int, torch.dtype]) -> Problems:
    """LayerNorm near 1e-40: rows and columns beside others, also in place, with tiny and with large factors."""
    M, N, dtype = case
    found: Problems = []
    generator = torch.Generator("cuda").manual_seed(1)

    def data(*shape: int, size: float = 1.0, like: torch.dtype = dtype) -> torch.Tensor:
        made = torch.randn(shape, device="cuda", generator=generator, dtype=torch.float64) + 0.5
        return (made * size).float().to(like)

    label = f"{dtype} {M}×{N}"
    x, w, mean = data(M, N), data(N), data(M, 1, like=torch.float32)
    rstd = torch.rand(M, 1, device="cuda", generator=generator) + 0.5
    for size, weights, scale in ((1e-40, 1, 1), (1e-30, 1e-15, 1e6), (1e-30, 1e-16, 1e4)):
        dy = data(M, N, size=size)
        dy[1], dy[2] = 0, x[2]
        given = (dy, x, [N], mean, rstd * scale, w * weights)
        found += judged("layer_norm_backward", given, f"rows of {size} and {weights} {label}")
        out = (dy, torch.empty_like(w), torch.empty_like(w))
        found += judged("layer_norm_backward", given, f"in place, rows of {size} and {weights} {label}", out)
    dy, large = data(M, N, size=1e-12), data(M, N, size=1e31)
    found += judged("layer_norm_backward", (dy, large, [N], mean, rstd * 1e-31), f"large data {label}")
    dy = data(M, N)
    dy[:, ::5] = data(M, (N + 4) // 5, size=1e-40)
    found += judged("layer_norm_backward", (dy, x, [N], mean, rstd, w), f"columns {label}")
    for size, eps in ((1e-25, 0.0), (1e-40, 1e-5), (1e-38, 1e-26)):
        small = data(M, N, size=size)
        small[1], small[2] = 0, x[2]
        found += judged("layer_norm", (small, [N], w, w, eps), f"numbers of {size}, eps {eps} {label}")
        found += judged("layer_norm", (small, [N], w, None, eps), f"numbers of {size}, eps {eps}, no bias {label}")
        out = (small, torch.empty_like(mean), torch.empty_like(mean))
        found += judged("layer_norm", (small, [N], w, None, eps), f"in place, {size}, eps {eps} {label}", out)
    return found


def near_zero() -> Problems:
    """The same of several sizes at a time."""
    sizes = ((5, 300), (70, 300), (9, 4000), (70, 9000), (6, 70000))
    cases = [(M, N, dtype) for M, N in sizes for dtype in (torch.float32, torch.bfloat16)]
    return at_a_time(near_zero_of, cases)


def groups_near_zero_of(case: tuple[tuple[int, int, int, int], torch.dtype]) -> Problems:
    """GroupNorm backward near 1e-40: beside zeros and ordinary groups, with masks, tiny and large factors, in place."""
    sizes, dtype = case
    N, C, P, group = sizes
    found: Problems = []
    generator = torch.Generator("cuda").manual_seed(1)

    def data(*shape: int, size: float = 1.0, like: torch.dtype = dtype) -> torch.Tensor:
        made = torch.randn(shape, device="cuda", generator=generator, dtype=torch.float64) + 0.5
        return (made * size).float().to(like)

    x, w, mean = data(N, C, P), data(C, like=torch.float32), data(N, group, like=torch.float32)
    rstd = torch.rand(N, group, device="cuda", generator=generator) + 0.5
    both, only_input, only_weight = (True, True, True), (True, False, False), (False, True, False)
    for size, weights, scale, mask in (
        (1e-40, 1, 1, both),
        (1e-43, 1, 1, both),
        (1e-40, 1, 1, only_input),
        (1e-43, None, 1e3, only_input),
        (1e-43, None, 1, only_weight),
        (1e-30, 1e-15, 1e6, both),
        (1e-30, 1e-16, 1e4, both),
    ):
        dy = data(N, C, P, size=size)
        dy[1], dy[0, : C // group] = 0, x[0, : C // group]
        weight = None if weights is None else w * weights
        for order in in_both_orders(x):
            like = torch.empty_like(order).copy_(dy)
            given = (like, order, mean, rstd * scale, weight, *sizes, mask)
            label = f"groups of {size} and {weights} {dtype} {sizes} {order.stride()} {mask}"
            found += judged("group_norm_backward", given, label)
            if mask == both:
                out = (like, torch.empty_like(w), torch.empty_like(w))
                found += judged("group_norm_backward", given, "in place, " + label, out)
    dy, large = data(N, C, P, size=1e-12), data(N, C, P, size=1e31)
    given = (dy, large, torch.zeros_like(mean), rstd * 1e-31, None, *sizes)
    found += judged("group_norm_backward", given, f"large data {dtype} {sizes}")
    return found


def groups_near_zero() -> Problems:
    """The same of several sizes at a time: shared groups, several in a tile, rows, shared rows, and many samples."""
    every = ((3, 32, 4096, 4), (5, 48, 256, 8), (9, 64, 49, 4), (3, 16, 9025, 4), (4200, 4, 132, 1))
    return at_a_time(
        groups_near_zero_of, [(sizes, dtype) for sizes in every for dtype in (torch.float32, torch.bfloat16)]
    )


def channels_near_zero() -> Problems:
    """BatchNorm's sums of products that float32 rounds as subnormals, beside a channel of zeros."""
    found = []
    generator = torch.Generator("cuda").manual_seed(1)
    for dtype in (torch.float16, torch.bfloat16):
        for shape in ((2, 3, 196), (300, 70, 1), (40, 3, 49), (8, 64, 4096)):
            dy, x = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(2))
            v = torch.rand(shape[1], device="cuda", generator=generator) + 0.5
            mean = v.clone()
            x[:, 0], mean[0], dy[:, 2] = x[:, 0] * 1e-40, 1e-41, 0
            for order in in_both_orders(x):
                label = f"channels near zero {dtype} {shape} {order.stride()}"
                found += judged("batch_norm_reduce_backward", (dy, order, mean, v, v), label)
    return found


def at_the_mean() -> Problems:
    """Of numbers that equal their mean the result is the bias, however large the weight and small the deviation."""
    found = []
    generator = torch.Generator("cuda").manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        for C, P, group in ((6, 15, 3), (256, 49, 2), (2, 3136, 2), (8, 9000, 2)):
            x = torch.round(3 * torch.randn(20, C, P, device="cuda", generator=generator))
            x[:5] = 1
            x[5:10, :, P // 2], x[5:10, :, P - P // 2 :] = 0, -x[5:10, :, : P // 2]  # the mean is 0
            w = torch.full((C,), 3008.0, device="cuda", dtype=dtype)
            for order in in_both_orders(x.to(dtype)):
                label = f"at the mean {dtype} {C}×{P}"
                found += judged("group_norm", (order, w, None, 20, C, P, group, 1e-12), label + " groups")
            found += judged("layer_norm", (x.to(dtype), [P], None, None, 1e-12), label + " rows")
            found += judged("batch_norm_stats", (x.to(dtype), 1e-12), label + " channels")
    return found


def places_apart() -> Problems:
    """GroupNorm with other places between those of a channel, in tiles of which a warp has several channels."""
    found = []
    generator = torch.Generator("cuda").manual_seed(1)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for N, C, P, group in ((1, 60, 2047, 1), (2, 16, 3136, 8), (2, 512, 64, 4), (3, 12, 50, 4)):
            x = torch.randn(N, C, P, device="cuda", generator=generator).to(dtype)
            statistics = torch.zeros(N, group, device="cuda"), torch.ones(N, group, device="cuda")
            views = [x.repeat_interleave(step, -1)[..., ::step] for step in (2, 16)]
            for view in (*views, x[..., :1].expand(N, C, P)):
                label = f"places apart {dtype} {C}×{P} {view.stride()}"
                found += judged("group_norm", (view, None, None, N, C, P, group), label)
                found += judged("group_norm_backward", (view, view, *statistics, None, N, C, P, group), label)
    return found


def outliers() -> Problems:
    """One number is nearly all of the variance, and adding the others to its square rounds each time the same way."""
    found = []
    generator = torch.Generator("cuda").manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        for C, P, group in ((60, 64, 60), (32, 49, 4), (64, 1000, 8), (8, 9000, 2)):
            x = torch.randn(8, C, P, device="cuda", generator=generator)
            x[..., :: max(P // 3, 1)] *= 10.0 ** (1 + 7 * torch.rand(8, C, 1, device="cuda", generator=generator))
            x[0] = torch.randn(C, P, device="cuda", generator=generator)
            x[0, :, 1], x[0, :, 9] = 2.0**15, -(2.0**15)  # nothing of these is left in the mean
            for order in in_both_orders(x.to(dtype)):
                label = f"outliers {dtype} {C}×{P}"
                found += judged("group_norm", (order, None, None, 8, C, P, group), label + " groups")
            found += judged("layer_norm", (x.to(dtype), [P]), label + " rows")
            found += judged("batch_norm_stats", (x.to(dtype),), label + " channels")
    return found


def constants_of(dtype: torch.dtype) -> Problems:
    """Of equal numbers sums that are made one by one are rounded the same way each time."""
    found = []
    generator = torch.Generator("cuda").manual_seed(1)

    def data(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda", generator=generator) * 20).to(dtype)

    for C, P, group in ((60, 3136, 20), (60, 3137, 20), (60, 4096, 60), (500, 64, 4)):
        x = data(1, C, 1).repeat(1, 1, P)
        statistics = torch.zeros(1, group, device="cuda"), torch.ones(1, group, device="cuda")
        for order in in_both_orders(x):
            label = f"constants {dtype} {C}×{P} {order.stride()}"
            found += judged("group_norm_backward", (order, order, *statistics, None, 1, C, P, group), label)
    zeros, ones = torch.zeros(C, device="cuda"), torch.ones(C, device="cuda")
    for order in in_both_orders(x.repeat(40, 1, 1)):
        label = f"constants {dtype} {tuple(order.shape)} {order.stride()}"
        found += judged("batch_norm_reduce_backward", (order, order, zeros, ones, ones), label)
        found += judged("batch_norm_stats", (order,), label)
    for M, N in ((512, 17), (512, 33), (512, 512), (64, 4096), (16, 40000)):
        statistics, w = (
            (torch.zeros(M, 1, device="cuda"), torch.ones(M, 1, device="cuda")),
            torch.ones(N, device="cuda"),
        )
        rows = data(M, 1).repeat(1, N)
        apart = [rows.T.contiguous().T] if N == 512 else []
        for kind, x in (("columns", data(1, N).repeat(M, 1)), *(("rows", order) for order in (rows, *apart))):
            label = f"constants {dtype} {M}×{N} {kind} {x.stride()}"
            found += judged("layer_norm_backward", (x, x, [N], *statistics, w), label)
    return found


def constants() -> Problems:
    """The same of all dtypes at a time."""
    return at_a_time(constants_of, (torch.float32, torch.float16, torch.bfloat16))


def rows_alone_of(case: tuple[int, torch.dtype]) -> Problems:
    """Rows of LayerNorm have the same bits among few as among many."""
    N, dtype = case
    generator = torch.Generator("cuda").manual_seed(1)
    dy, x = (torch.randn(2000, N, device="cuda", generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(N, device="cuda", generator=generator).to(dtype)
    y, *statistics = normgrad.layer_norm(x, [N], weight)
    grad = normgrad.layer_norm_backward(dy, x, [N], *statistics, weight)[0]
    found = []
    for some in (slice(0, 1), slice(7, 10), slice(5, 69)):
        alone, *few = normgrad.layer_norm(x[some], [N], weight)
        gradient = normgrad.layer_norm_backward(dy[some], x[some], [N], *few, weight)[0]
        if not (torch.equal(alone, y[some]) and torch.equal(gradient, grad[some])):
            found.append(f"rows alone {dtype} {N} {some}")
    return found


def rows_alone() -> Problems:
    """The same of several sizes at a time."""
    sizes, dtypes = (100, 300, 1001, 5120), (torch.float32, torch.bfloat16)
    return at_a_time(rows_alone_of, [(N, dtype) for N in sizes for dtype in dtypes])


CHECKS: list[Callable[[], Problems]] = [
    masks_and_strides,
    streams,
    gathered,
    special_values,
    near_zero,
    groups_near_zero,
    channels_near_zero,
    at_the_mean,
    places_apart,
    outliers,
    constants,
    rows_alone,
]


def main() -> int:
    """Run the checks, or those named by arguments, and say what is wrong."""
    wrong = 0
    for check in [check for check in CHECKS if check.__name__ in sys.argv[1:] or not sys.argv[1:]]:
        problems = check()
        wrong += len(problems)
        print(f"{check.__name__}: {len(problems)} wrong", *problems[:6], sep="\n  ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
