"""Whether what ranks found is what one process finds on the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from normgrad.testing import ulp
from support.sync_cases import STEPS, Case, terms, train_in_one_process

LOCAL = ("grad_weight", "grad_bias")  # of a rank's own batch: the whole batch's is their sum


def assert_one_batch_norm(name: str, case: Case, ranks: list[dict[str, Tensor]]) -> None:
    """What the ranks found is what one process finds, and what they share has the same bits on all."""
    exact = train_in_one_process(case, torch.float64)
    theirs = train_in_one_process(case, case.dtype)
    sizes = terms(case)
    assert {*ranks[0]} == {*exact}, name
    for key, expected in exact.items():
        found, what = [rank[key] for rank in ranks], f"{name}: {key}"
        if key in LOCAL:
            whole = torch.stack(found).double().sum(0)
        elif expected.dim() < 2:
            assert all(torch.equal(part, found[0]) for part in found), f"{what} differs between ranks"
            whole = found[0]
        else:
            whole = torch.cat(found)
        if key == "num_batches_tracked":
            assert int(whole) == STEPS, what
            continue
        stored = case.parameters if expected.dim() < 2 else case.dtype
        assert found[0].dtype == stored, what
        assert_close(what, whole, expected, sizes[key], stored, case)
        assert_close(f"{what} of nn.BatchNorm", theirs[key], expected, sizes[key], stored, case)
    if case.same_on_all:
        for key, value in ranks[0].items():
            assert all(torch.equal(rank[key], value) for rank in ranks), f"{name}: {key} differs between ranks"


def assert_close(what: str, actual: Tensor, expected: Tensor, size: Tensor, stored: torch.dtype, case: Case) -> None:
    """A few roundings of the terms, and those to the dtype in which the result is stored."""
    size = size if expected.dim() < 2 else size.reshape(1, -1, *(1 for _ in case.tail)).expand_as(expected)
    allowed = 4 * size * (2.0**-53 if case.dtype == torch.float64 else 2.0**-24)
    if stored in (torch.float16, torch.bfloat16):
        dtype = str(stored).removeprefix("torch.")
        if case.parameters == stored:  # buffers and gradients are rounded at every step, and used after that
            allowed = allowed + STEPS * torch.from_numpy(ulp(size.numpy(), dtype))
        else:
            allowed = allowed + 0.5 * torch.from_numpy(ulp(expected.numpy(), dtype))
    worst = ((actual.double() - expected).abs() / allowed).max()
    assert worst <= 1, f"{what}: {worst:.2f} of what is allowed"
