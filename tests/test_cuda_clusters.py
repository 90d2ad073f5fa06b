"""GroupNorm in clusters of one CTA that sends to itself: Triton's interpreter runs CTAs one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import normgrad
from support.interpreted import backend as backend
from support.interpreted import interpreted as interpreted
from support.interpreted import needs_interpreter, random_data, random_rstd, run_with_interpreter, without_interpreter

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytest.importorskip("torch")

RECEIVED: list[tuple[Any, Any]] = []  # by iteration


@without_interpreter
def test_this_file_passes_with_the_interpreter_on() -> None:
    run_with_interpreter(__file__)


@triton.jit
def _init_cta_exchange():  # type: ignore[no-untyped-def]
    return 0


@triton.jit
def _send_to_ctas(first, second, exchange, part, iteration, ROWS, PARTS):  # type: ignore[no-untyped-def]
    RECEIVED.append((first.to(tl.float64), second.to(tl.float64)))


@triton.jit
def _wait_for_ctas(exchange, iteration, ROWS, PARTS):  # type: ignore[no-untyped-def]
    return RECEIVED[iteration]


@triton.jit
def _sum_received(received, PARTS):  # type: ignore[no-untyped-def]
    return received


@triton.jit
def _received_from(part, received):  # type: ignore[no-untyped-def]
    return received


@pytest.fixture
def clustered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run kernels as clusters of one CTA; return their names."""
    from normgrad.cuda.device import cluster_exchange
    from support import interpreter

    for double in (_init_cta_exchange, _send_to_ctas, _wait_for_ctas, _sum_received, _received_from):
        monkeypatch.setattr(cluster_exchange, double.__name__[1:], double)
    found: list[str] = []
    interpret = interpreter.interpret

    def in_cluster(step: Any, addresses: Any, workspace: int) -> None:
        tile = step.constants.get("TILE")
        if hasattr(tile, "cluster") and tile.parts == 1:
            found.append(step.kernel.fn.__name__)
            constants = {**step.constants, "TILE": replace(tile, cluster=True)}
            step = replace(step, grid=(1, 1, 1), arguments=_one_cta_group(step), constants=constants)
            RECEIVED.clear()
        interpret(step, addresses, workspace)

    monkeypatch.setattr(interpreter, "interpret", in_cluster)
    return found


def _one_cta_group(step: Any) -> list[Any]:
    cta_groups = step.kernel.arg_names.index("cta_groups")
    return [1 if index == cta_groups else argument for index, argument in enumerate(step.arguments)]


def _results(sizes: tuple[int, int, int, int], dtype: Any, weighted: bool) -> Sequence[Any]:
    N, C, HxW, group = sizes
    dy, x = random_data((N, C, HxW), dtype, 1), random_data((N, C, HxW), dtype, 2)
    mean, rstd = random_data((N, group), np.float32, 3), random_rstd((N, group), 4)
    weight = random_data((C,), dtype, 5) if weighted else None
    backward = normgrad.group_norm_backward(dy, x, mean, rstd, weight, *sizes)
    return [*backward, *normgrad.group_norm(x, weight, weight, *sizes)]


@needs_interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("sizes", [(5, 6, 12, 3), (3, 6, 20, 2)])
def test_groups_prefetched_by_one_iteration_have_the_same_results(
    sizes: tuple[int, int, int, int], dtype: Any, weighted: bool, request: pytest.FixtureRequest
) -> None:
    without_clusters = _results(sizes, dtype, weighted)
    kernels = request.getfixturevalue("clustered")
    for one, other in zip(without_clusters, _results(sizes, dtype, weighted), strict=True):
        assert np.array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))
    assert set(kernels) == {"group_norm_backward_contiguous", "group_norm_forward_contiguous"}
