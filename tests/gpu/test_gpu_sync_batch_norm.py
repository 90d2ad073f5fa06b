"""Synchronised BatchNorm on one GPU: one rank over NCCL that exchanges with itself, two ranks over gloo."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from normgrad.torch import SyncBatchNorm
from support.sync_cases import Case, cases, train_on_rank
from support.sync_checks import assert_one_batch_norm

ALONE = ["uneven", "bfloat16", "channels last", "cumulative", "not affine", "float16"]
COMPILED = ["uneven", "an empty rank", "bfloat16", "channels last", "cumulative", "not affine", "no running statistics"]


class Exchanging(SyncBatchNorm):
    """Exchanges even in a group of one."""

    def _group_of_several(self):
        return dist.group.WORLD if self.training else None


def spawn(folder, backend, ranks, job):
    """Run a job on every rank; what fails there fails here."""
    mp.spawn(_on_rank, (str(folder), backend, ranks, job), nprocs=ranks)


def _on_rank(rank, folder, backend, ranks, job):
    torch.cuda.set_device(0)
    meeting, patience = Path(folder, "meeting").as_uri(), datetime.timedelta(seconds=60)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks, timeout=patience)
    job()
    dist.destroy_process_group()


def unchanged(norm):
    return norm


def compiled(norm):
    torch.compiler.reset()
    return torch.compile(norm, fullgraph=True)


def one_rank():
    for name in ALONE:
        case = cases(2)[name]
        whole = Case(**{**vars(case), "split": (sum(case.split),)})
        for wrap in (unchanged, compiled):
            assert_one_batch_norm(name, whole, [train_on_rank(whole, None, wrap, "cuda", Exchanging)])


def two_ranks():
    for wrap, names in ((unchanged, list(cases(2))), (compiled, COMPILED)):
        for name in names:
            found = [None, None]
            dist.all_gather_object(found, train_on_rank(cases(2)[name], None, wrap, "cuda", None))
            assert_one_batch_norm(name, cases(2)[name], found)


def host_does_not_wait():
    for samples in (4, 0):
        for momentum in (0.1, None):
            norm = Exchanging(64, momentum=momentum).cuda()
            x = torch.randn(samples, 64, 8, 8, device="cuda", requires_grad=True)
            grad_out = torch.randn_like(x)
            norm(x).backward(grad_out)
            torch.cuda.set_sync_debug_mode("error")
            norm(x).backward(grad_out)
            torch.cuda.set_sync_debug_mode("default")


def captured():
    torch.manual_seed(0)
    x = torch.randn(8, 64, 8, 8, device="cuda", requires_grad=True)
    grad_out = torch.randn_like(x)
    norm = Exchanging(64).cuda()

    def step():
        output = norm(x)
        return output, *torch.autograd.grad(output, (x, *norm.parameters()), grad_out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for tensor in found:
        tensor.detach().zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("job", [one_rank, host_does_not_wait, captured])
def test_one_rank_over_nccl(job, tmp_path):
    spawn(tmp_path, "nccl", 1, job)


def test_two_ranks_over_gloo(tmp_path):
    spawn(tmp_path, "gloo", 2, two_ranks)
