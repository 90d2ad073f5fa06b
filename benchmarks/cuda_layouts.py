"""Masks, strided rows, a captured graph and another stream on the GPU, against the oracle; status 1 if wrong."""

from __future__ import annotations

import itertools
import sys

import torch

import normgrad
from normgrad.testing import compare, oracle, terms


def main() -> int:
    """Check LayerNorm backward on rows that one program holds and on rows that several share."""
    wrong = 0
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
                    wrong += 1
                    print("WRONG", M, N, mask, report.text)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
