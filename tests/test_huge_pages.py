"""Large results in PyTorch's memory: huge pages are requested before a kernel writes them."""

import re
import sys
from pathlib import Path

import pytest

import normgrad
from normgrad.contract import huge_pages

torch = pytest.importorskip("torch")

COLUMNS = 1024


def layer_norm(nbytes):
    return normgrad.layer_norm(torch.ones(nbytes // 4 // COLUMNS, COLUMNS), COLUMNS)[0]


@pytest.fixture
def requests(monkeypatch):
    made = []
    monkeypatch.setattr(huge_pages, "request", lambda *range_of_bytes: made.append(range_of_bytes))
    return made


def flags_of_mapping(address):
    """What the system says of the mapping that has an address."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(bound, 16) for bound in mapping.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return mapping.split("VmFlags:")[1].split()
    raise LookupError(address)


def test_request_for_each_call_with_a_large_result(requests):
    for _ in range(2):  # one that is checked in full, and one from the dispatch cache
        result = layer_norm(huge_pages.REQUESTED_FROM)
        assert requests.pop() == (result.data_ptr(), result.nbytes)


def test_no_request_for_smaller_results(requests):
    layer_norm(huge_pages.REQUESTED_FROM - 4 * COLUMNS)
    assert not requests


def test_no_request_for_memory_of_the_caller(requests):
    given = torch.empty(huge_pages.REQUESTED_FROM // 4 // COLUMNS, COLUMNS)
    statistics = torch.empty(len(given), 1)
    normgrad.layer_norm(torch.ones_like(given), COLUMNS, out=(given, statistics, statistics.clone()))
    assert not requests


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or not Path("/proc/self/smaps").exists(),
    reason="the system has no transparent huge pages",
)
def test_the_system_knows_of_the_request():
    result = layer_norm(64 << 20)
    assert "hg" in flags_of_mapping(result.data_ptr() + result.nbytes // 2)


def test_memory_without_a_whole_page_is_left_alone():
    memory = torch.zeros(8, dtype=torch.uint8)
    huge_pages.request(memory.data_ptr(), memory.nbytes)
    assert not memory.any()


def test_systems_without_huge_pages(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    huge_pages._madvise.cache_clear()
    try:
        assert huge_pages._madvise() is None
        huge_pages.request(1 << 20, 1 << 20)
    finally:
        huge_pages._madvise.cache_clear()
