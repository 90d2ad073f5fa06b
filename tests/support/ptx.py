"""Hashes of the PTX of all GPU kernels, to compare before and after a change that is to leave the code as it is.

    python3 tests/support/ptx.py [PART OF A NAME]

Compiles the calls of ``test_cuda_compile``, for sm_90 with clusters and with a cooperative launch and for sm_80, and
prints one line per launch: the call, the kernel's name, and a hash of its PTX without names and line numbers. Needs no
GPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def normalized(ptx: str, kernel: str) -> str:
    """Return PTX without comments, line numbers and the kernel's name."""
    lines = (re.sub(r"\s*//.*", "", line) for line in ptx.splitlines())
    kept = (line for line in lines if not line.lstrip().startswith((".loc", ".file")))
    return "\n".join(kept).replace(kernel, "kernel")


def hashes(operator: str, arguments: tuple[Any, ...], capability: int, chip: Any) -> Iterator[tuple[str, str]]:
    """Yield kernel and hash of every launch of a call."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile

    import test_cuda_compile
    from normgrad.cuda.backend import OPERATORS

    for step in OPERATORS[operator](test_cuda_compile._problem(operator, arguments), chip).steps:
        options = step.options.as_arguments(pdl_supported=capability >= 90)
        compiled = compile(test_cuda_compile._source(step), GPUTarget("cuda", capability, 32), options)
        name = step.kernel.fn.__name__
        yield name, hashlib.sha256(normalized(compiled.asm["ptx"], name).encode()).hexdigest()[:16]


def main(part: str = "") -> None:
    """Print the hashes of the calls in whose name the part occurs."""
    os.environ |= {"NORMGRAD_BACKEND": "reference", "TRITON_DISABLE_LINE_INFO": "1"}  # before Triton is imported
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[1:3]]
    import test_cuda_compile
    from normgrad.cuda.chip import Chip

    targets = {
        "sm_90 clusters": (90, test_cuda_compile._chip_with_clusters()),
        "sm_90": (90, Chip(132)),
        "sm_80": (80, Chip(108, shared_memory=164 * 1024)),
    }
    for call in [*test_cuda_compile.CALLS, *test_cuda_compile.CLUSTERS]:
        for target, (capability, chip) in targets.items():
            if part in str(call.id):
                for kernel, found in hashes(*call.values, capability, chip):  # type: ignore[call-arg, arg-type]
                    print(f"{call.id}, {target}: {kernel} {found}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
