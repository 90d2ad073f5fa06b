"""Every operator on the GPU against the float64 oracle, over shapes, dtypes and orders; status 1 if one is wrong.

Outputs and workspace are poisoned with NaN, every plan runs several times and must give the same bits.
"""

from __future__ import annotations

import math
import sys

import torch
from cuda_cases import Case, arguments, compile_ahead, expected, outputs, planned, tensors

from normgrad.testing import compare

LAYER_NORM = [
    (64, 1),
    (5, 7),
    (37, 256),
    (1, 1024),
    (133, 768),
    (300, 1000),
    (9, 4096),
    (50, 5000),
    (7, 16384),
    (3, 70000),
    (700, 16384),
    (40, 200000),
]
GROUP_NORM = [
    (2, 320, 1024, 32),
    (3, 64, 3136, 32),
    (2, 12, 50, 4),
    (5, 6, 1, 3),
    (2, 48, 3600, 4),
    (1, 8, 40000, 2),
    (2, 7, 9, 1),
    (3, 8, 77, 8),
    (40, 64, 49, 4),
    (9, 6, 49, 2),
    (3, 8, 3025, 2),
    (4, 320, 4096, 32),
]
RUNS = 8
LEFT_OUT = {(64, 1), (37, 256), (1, 1024), (300, 1000), (9, 4096), (700, 16384), (2, 12, 50, 4), (5, 6, 1, 3)}
LEFT_OUT |= {(2, 7, 9, 1), (3, 8, 77, 8), (2, 320, 1024, 32), (1000, 64, 1), (4, 300, 17)}
BATCH_NORM = [(16, 32, 1024), (3, 5, 49), (1000, 64, 1), (2, 3, 10000), (4, 300, 17), (8, 64, 196)]
BATCH_NORM += [(40, 512, 49), (6, 8, 3025), (300, 16, 9), (5, 20, 4096)]


def cases() -> list[Case]:
    """All of them."""
    found = []
    for dtype in ("float32", "bfloat16", "float16"):
        for sizes in LAYER_NORM:
            found += [Case("layer_norm_backward", sizes, dtype), Case("layer_norm", sizes, dtype)]
        for order in ("contiguous", "channels_last"):
            for group in GROUP_NORM:
                found += [Case("group_norm_backward", group, dtype, order), Case("group_norm", group, dtype, order)]
            for batch in BATCH_NORM:
                names = ("elemt_backward", "elemt", "stats", "reduce_backward")
                found += [Case(f"batch_norm_{name}", batch, dtype, order) for name in names]
    return found


def check(case: Case) -> str:
    """What is wrong with a case; nothing if nothing is."""
    made = tensors(case)
    results = outputs(case, made)
    plan = planned(case, made, results)
    workspace = torch.empty(plan.workspace_size, dtype=torch.uint8, device="cuda")
    bits = []
    for _ in range(RUNS):
        workspace.fill_(0xFF)
        for result in results:
            result.fill_(float("nan"))
        plan.run(workspace=workspace if plan.workspace_size else None)
        torch.cuda.synchronize()
        bits.append([result.clone(memory_format=torch.contiguous_format).reshape(-1) for result in results])
    for results_of_run in bits[1:]:
        for first, second in zip(bits[0], results_of_run, strict=True):
            if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
                return "the bits of two runs differ"
    for place, judged in enumerate(zip(results, *expected(case.operator, arguments(case, made)), strict=True)):
        result, exact, size = judged
        report = compare(result.cpu(), exact, size)
        if not report:
            return f"output {place}: {report.text}"
    return ""


def main() -> int:
    """Check the cases of the operators whose names begin as the arguments say, or all.

    With ``small`` among the arguments only a few, in this process alone (for compute-sanitizer); with ``some`` those
    that differ most, without float16.
    """
    names = tuple(name for name in sys.argv[1:] if name not in ("small", "some"))
    every = [
        case
        for case in cases()
        if not names or case.operator in names or (case.operator.startswith("batch") and "batch_norm" in names)
    ]
    if "some" in sys.argv:
        every = [case for case in every if case.dtype != "float16" and case.sizes not in LEFT_OUT]
    if "small" in sys.argv:
        every = [case for case in every if case.dtype == "bfloat16" and math.prod(case.shape) < 400_000]
    else:
        compile_ahead(every, processes=3 if names else 14)
    wrong = 0
    for case in every:
        print("checks", case, end="\r", flush=True)  # the last word of a check that hangs
        try:
            problem = check(case)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:400]
        if problem:
            wrong += 1
            print("WRONG", case, problem, flush=True)
    print(f"{len(every) - wrong} of {len(every)} cases are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
