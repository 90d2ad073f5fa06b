"""Hashes of the native code of all CPU kernels, to compare before and after a change that is to leave it as it is.

    python3 tests/support/cpu_code.py [PART OF A NAME]

Compiles every kernel for every dtype and layout, for this processor, and prints one line for each: its name, a hash of
its code and constants, and their bytes.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_KERNELS = "normgrad.cpu.kernels."
_CHANNEL = {
    "group_norm": ("group_norm_backward", "group_norm"),
    "batch_norm": (
        "batch_norm_elemt_backward",
        "batch_norm_reduce_backward",
        "batch_norm_stats",
        "batch_norm_elemt",
    ),
}


def sections(code: bytes) -> Iterator[bytes]:
    """Yield the sections of a 64-bit ELF file that are loaded."""
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    for header in range(start, start + size * count, size):
        kind, flags, _, offset, length = struct.unpack_from("<IQQQQ", code, header + 4)
        if kind == 1 and flags & 2:  # SHT_PROGBITS, SHF_ALLOC
            yield code[offset : offset + length]


def main(part: str = "") -> None:
    """Print the hashes of the kernels in whose name the part occurs."""
    sys.path[:0] = [str(Path(__file__).parents[2])]
    from normgrad.cpu.compile.compiler import compiled
    from normgrad.cpu.tags import BF16, COLUMNS, F16, F32, ROWS, Tag

    dtypes = F32, F16, BF16
    kernels: list[tuple[str, str, tuple[Tag, ...]]] = [
        *(("layer_norm.backward", "layer_norm_backward", (dtype,)) for dtype in dtypes),
        *(("layer_norm.forward", "layer_norm", (dtype,)) for dtype in dtypes),
        *(
            (module, name, (dtype, layout))
            for module, names in _CHANNEL.items()
            for name in names
            for dtype in dtypes
            for layout in (ROWS, COLUMNS)
        ),
        ("batch_norm", "batch_norm_gather_stats_with_counts", ()),
        *(("copy", "copy", (source, F32)) for source in dtypes),
        *(("copy", "copy", (dtype, dtype)) for dtype in (F16, BF16)),
        *(("copy", "copy", (F32, target)) for target in (F16, BF16)),
        ("copy", "fill", ()),
    ]
    for module, name, tags in kernels:
        variant = " ".join((name, *(tag.name for tag in tags)))
        if part in variant:
            code = b"".join(sections(compiled(_KERNELS + module, name, tags, "kernel")))
            print(variant, hashlib.sha256(code).hexdigest()[:16], len(code), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
