"""Every operator on the GPU against the oracle: sizes, formats, masks, streams, graphs; the same bits in every run."""

from __future__ import annotations

import itertools

import pytest
import torch

import normgrad
from normgrad.bench.cases import CHANNELS_LAST, CONTIGUOUS, DTYPES, Case
from normgrad.bench.verification import Claim, verify
from normgrad.bench.workload import workload
from normgrad.testing import oracle, terms
from support.gpu import check_call, check_results, generator

ROWS = [(64, 1), (5, 7), (37, 256), (1, 1024), (133, 768), (300, 1000), (9, 4096), (50, 5000), (7, 16384), (3, 70000)]
ROWS += [(700, 16384), (40, 200000)]
GROUPS = [
    *(((2, 320, 1024), 32), ((3, 64, 3136), 32), ((2, 12, 50), 4), ((5, 6, 1), 3), ((2, 48, 3600), 4)),
    *(((1, 8, 40000), 2), ((2, 7, 9), 1), ((3, 8, 77), 8), ((40, 64, 49), 4), ((9, 6, 49), 2)),
    *(((3, 8, 3025), 2), ((4, 320, 4096), 32)),
]
CHANNELS = [(16, 32, 1024), (3, 5, 49), (1000, 64, 1), (2, 3, 10000), (4, 300, 17), (8, 64, 196), (40, 512, 49)]
CHANNELS += [(6, 8, 3025), (300, 16, 9), (5, 20, 4096)]
BATCH_NORM = [f"batch_norm_{name}" for name in ("elemt_backward", "elemt", "stats", "reduce_backward")]
LAYOUTS = (CONTIGUOUS, CHANNELS_LAST)
CASES = [
    *(Case(name, shape, dtype) for name in ("layer_norm_backward", "layer_norm") for shape in ROWS for dtype in DTYPES),
    *(
        Case(name, shape, dtype, layout, group)
        for name in ("group_norm_backward", "group_norm")
        for shape, group in GROUPS
        for dtype in DTYPES
        for layout in LAYOUTS
    ),
    *(Case(*each) for each in itertools.product(BATCH_NORM, CHANNELS, DTYPES, LAYOUTS)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_within_the_bound_and_the_same_in_every_run(case):
    work = workload(case, device="cuda")
    results = work.outputs()
    plan = work.operator.plan(**work.arguments, out=results)
    plan.repeatable = True
    workspace = torch.empty(plan.workspace_size, dtype=torch.uint8, device="cuda")
    first: list[torch.Tensor] = []
    for _ in range(8):
        workspace.fill_(0xFF)
        for result in results:
            result.fill_(float("nan"))
        plan.run(workspace=workspace if plan.workspace_size else None)
        torch.cuda.synchronize()
        copies = (result.clone(memory_format=torch.contiguous_format) for result in results)
        bits = [copy.reshape(-1).view(torch.uint8) for copy in copies]
        first = first or bits
        assert all(map(torch.equal, bits, first))
    claim = Claim(results)
    verify(work, [claim])
    assert not claim.verdict.problem


@pytest.mark.parametrize("mask", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize(("M", "N"), [(37, 300), (20, 20000)])  # rows that one program holds, and that several share
def test_masks_and_strides_on_a_stream_and_in_a_graph(M, N, mask):
    dy, x = torch.randn(M, 2 * N, device="cuda")[:, ::2], torch.randn(M, N + 3, device="cuda")[:, 3:]
    mean, rstd = torch.randn(M, 1, device="cuda"), torch.rand(M, 1, device="cuda") + 0.5
    weight = torch.randn(N, device="cuda")
    host = [tensor.cpu().numpy() for tensor in (dy, x, mean, rstd, weight)]
    given = (*host[:2], [N], *host[2:], None, mask)
    shapes = ((M, N), (N,), (N,))
    out = tuple(
        torch.full(shape, torch.nan, device="cuda") if wanted else None
        for shape, wanted in zip(shapes, mask, strict=True)
    )
    plan = normgrad.layer_norm_backward.plan(dy, x, [N], mean, rstd, weight, None, mask, out=out)
    plan.repeatable = True
    workspace = torch.full((plan.workspace_size + 1,), 255, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    plan.run(workspace=workspace, stream=stream)
    torch.cuda.synchronize()
    wanted = [tensor for tensor in out if tensor is not None]
    once = [tensor.clone() for tensor in wanted]
    if wanted:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.run(workspace=workspace)
        for tensor in wanted:
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
    assert all(map(torch.equal, once, wanted))
    check_results(out, oracle.layer_norm_backward(*given), terms.layer_norm_backward(*given))


def test_the_private_function_for_the_current_stream():
    from normgrad.cuda import backend

    device = torch.cuda.current_device()
    assert backend._current_handle is not backend._handle_by_object
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            assert backend._current_handle(device) == backend._handle_by_object(device) == stream.cuda_stream


def shared_work():
    """Return calls whose programs wait for each other: rows and groups that none holds alone."""
    M, N = 64, 40000
    groups = (6, 384, 3600, 32)

    def data(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    found = []
    for _ in range(4):
        rows = torch.zeros(M, 1, device="cuda"), torch.ones(M, 1, device="cuda")
        statistics = torch.zeros(6, 32, device="cuda"), torch.ones(6, 32, device="cuda")
        x, dy = data(*groups[:3]), data(*groups[:3])
        found += [
            (normgrad.layer_norm_backward, (data(M, N), data(M, N), [N], *rows)),
            (normgrad.group_norm_backward, (dy, x, *statistics, None, *groups)),
            (normgrad.group_norm, (x, None, None, *groups)),
        ]
    return found


def test_calls_on_several_streams_have_the_bits_of_calls_alone():
    calls = shared_work()
    alone = [operator(*given) for operator, given in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(priority=-(number % 2)) for number in range(len(calls))]
    together = [()] * len(calls)
    for _ in range(20):
        for number, (stream, (operator, given)) in enumerate(zip(streams, calls, strict=True)):
            with torch.cuda.stream(stream):
                together[number] = operator(*given)
    torch.cuda.synchronize()
    for one, other in zip(alone, together, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(("ranks", "C"), [(1, 5), (8, 1000), (300, 33)])
def test_statistics_of_all_ranks_some_of_them_without_a_count(ranks, C, running):
    x = torch.zeros(1, C, device="cuda")
    mean, invstd = torch.randn(ranks, C, device="cuda"), torch.rand(ranks, C, device="cuda") + 0.5
    counts = torch.randint(0, 50, (ranks,), device="cuda", dtype=torch.int32) + (ranks == 1)
    moving = (torch.rand(C, device="cuda"), torch.rand(C, device="cuda") + 0.5) if running else (None, None)
    check_call("batch_norm_gather_stats_with_counts", x, mean, invstd, *moving, 0.1, 1e-5, counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("N", [100, 300, 1001, 5120])
def test_rows_have_the_same_bits_among_few_as_among_many(N, dtype):
    random = generator()
    dy, x = (torch.randn(2000, N, device="cuda", generator=random).to(dtype) for _ in range(2))
    weight = torch.randn(N, device="cuda", generator=random).to(dtype)
    y, *statistics = normgrad.layer_norm(x, [N], weight)
    grad = normgrad.layer_norm_backward(dy, x, [N], *statistics, weight)[0]
    for some in (slice(0, 1), slice(7, 10), slice(5, 69)):
        alone, *few = normgrad.layer_norm(x[some], [N], weight)
        gradient = normgrad.layer_norm_backward(dy[some], x[some], [N], *few, weight)[0]
        assert torch.equal(alone, y[some])
        assert torch.equal(gradient, grad[some])


def test_data_that_is_not_aligned_has_the_same_bits():
    x, dy = (torch.randn(128, 768, device="cuda") for _ in range(2))
    _, mean, rstd = normgrad.layer_norm(x, [768])
    expected = normgrad.layer_norm_backward(dy, x, [768], mean, rstd)
    for offset in (1, 4, 1):
        moved = torch.empty(x.numel() + offset, device="cuda")[offset:].view(x.shape).copy_(x)
        found = normgrad.layer_norm_backward(dy, moved, [768], mean, rstd)
        assert all(map(torch.equal, found, expected))


def test_more_than_2_to_the_31_elements():
    rows, columns = 2**20 + 64, 2048
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_()
    dy = torch.empty_like(x).normal_()
    mean, rstd = torch.zeros(rows, 1, device="cuda"), torch.ones(rows, 1, device="cuda")
    grad, _, bias_sum = normgrad.layer_norm_backward(dy, x, [columns], mean, rstd)
    tail = slice(rows - 40, rows)
    alone = normgrad.layer_norm_backward(dy[tail], x[tail], [columns], mean[tail], rstd[tail])[0]
    assert torch.equal(grad[tail], alone)
    exact = sum((part.double().sum(0) for part in dy.split(65536)), torch.zeros(columns, device="cuda").double())
    size = sum((part.double().abs().sum(0) for part in dy.split(65536)), torch.zeros(columns, device="cuda").double())
    check_results(bias_sum, exact.cpu().numpy(), size.cpu().numpy())
