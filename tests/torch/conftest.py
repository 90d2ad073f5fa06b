"""Fixtures for tests of small tensors, in thousands of calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from normgrad.torch import heuristics


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch's threads would wait for each other far longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_tensors_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing to PyTorch for being small, so that small tensors show what large ones do."""
    monkeypatch.setattr(heuristics, "MIN_FLOAT32", 0)
    monkeypatch.setattr(heuristics, "MIN_FLOAT32_CHANNELS_LAST", 0)
    monkeypatch.setattr(heuristics, "MIN_16_BITS", {})
