"""Descriptors: what the host side packs is what a kernel reads, and no two fields share a word."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normgrad.cpu import descriptors
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.descriptors import Counter, Phase, Pointer, layout, pack, size
from normgrad.cpu.prepare.launch import Workspace

_DECLARED = [each for each in vars(descriptors).values() if is_dataclass(each) and isinstance(each, type)]
_STRUCTS: list[Any] = [each for each in _DECLARED if each.__name__ not in ("Pointer", "Field")]


@pytest.mark.parametrize("struct", _STRUCTS, ids=lambda struct: struct.__name__)
def test_no_two_fields_share_a_word(struct: Any) -> None:
    words = [word for each in layout(struct).values() for word in range(each.offset, each.offset + each.words)]
    assert len(words) == len(set(words))
    assert max(words) < size(struct)
    assert len(pack(struct())[0]) == size(struct)


@pytest.mark.parametrize("struct", [s for s in _STRUCTS if any(each.type is Phase for each in layout(s).values())])
def test_counters_of_phases_share_no_cache_line_with_other_fields(struct: Any) -> None:
    """Wherever in a cache line of eight words the descriptor begins."""
    phases = [each for each in layout(struct).values() if each.type is Phase]
    others = [each for each in layout(struct).values() if each.type is not Phase]
    first, last = min(each.offset for each in phases), max(each.offset + each.words for each in phases)
    assert all(each.offset + each.words + 7 < first or each.offset > last + 7 for each in others)
    assert size(struct) >= last + 8


def test_a_kernel_reads_what_the_host_side_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.probe import Part, Probe

    monkeypatch.setenv("NORMGRAD_CACHE_DIR", str(tmp_path))
    result = np.zeros(5, np.int64)
    given = Probe(7, Part(8, 0.25), (1, 2, 3), Workspace().take(40), Phase(Counter(10), Counter(20)))
    words, pointers = pack(given)
    assert pointers == [(layout(Probe)["result"].offset, Pointer.to_workspace(0))]
    words[pointers[0][0]] = result.ctypes.data
    assert Kernel("support.probe", "probe").entry(())(words.buffer_info()[0]) == 0
    assert result[[0, 1, 3, 4]].tolist() == [7, 8, 3, 35]
    assert result[2:3].view(np.float64)[0] == 0.25
