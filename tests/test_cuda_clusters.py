"""GroupNorm in clusters of one program that hears itself: Triton's interpreter has no others."""

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
from support.interpreted import only_elsewhere, only_there, random_data, run_with_it, scales

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytest.importorskip("torch")

HEARD: list[tuple[Any, Any]] = []


@only_elsewhere
def test_with_the_interpreter_on() -> None:
    run_with_it(__file__)


@triton.jit
def _open_slots():  # type: ignore[no-untyped-def]
    return 0


@triton.jit
def _tell(first, second, slots, part, turn, ROWS, PARTS):  # type: ignore[no-untyped-def]
    HEARD.append((first.to(tl.float64), second.to(tl.float64)))


@triton.jit
def _wait_for_all(slots, turn, ROWS, PARTS):  # type: ignore[no-untyped-def]
    return HEARD[turn]


@triton.jit
def _sums_of_all(told, PARTS):  # type: ignore[no-untyped-def]
    return told


@triton.jit
def _told_by(part, told):  # type: ignore[no-untyped-def]
    return told


@pytest.fixture
def clustered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were run as clusters of one program."""
    from normgrad.cuda import interpreter
    from normgrad.cuda.group_norm import contiguous_backward_kernel as group_norm
    from normgrad.cuda.group_norm import contiguous_forward_kernel as group_norm_forward

    for module in (group_norm, group_norm_forward):
        for double in (_open_slots, _tell, _wait_for_all, _sums_of_all, _told_by):
            monkeypatch.setattr(module, double.__name__[1:], double, raising=False)
    found: list[str] = []
    interpret = interpreter.interpret

    def in_cluster(step: Any, addresses: Any, workspace: int) -> None:
        if "CLUSTER" in step.constants and step.constants["PARTS"] == 1:
            found.append(step.kernel.fn.__name__)
            step = replace(
                step, grid=(1, 1, 1), arguments=_one_team(step), constants={**step.constants, "CLUSTER": True}
            )
            HEARD.clear()
        interpret(step, addresses, workspace)

    monkeypatch.setattr(interpreter, "interpret", in_cluster)
    return found


def _one_team(step: Any) -> list[Any]:
    teams = step.kernel.arg_names.index("teams")
    return [1 if place == teams else argument for place, argument in enumerate(step.arguments)]


def _results(sizes: tuple[int, int, int, int], dtype: Any, weighted: bool) -> Sequence[Any]:
    N, C, HxW, group = sizes
    dy, x = random_data((N, C, HxW), dtype, 1), random_data((N, C, HxW), dtype, 2)
    mean, rstd = random_data((N, group), np.float32, 3), scales((N, group), 4)
    weight = random_data((C,), dtype, 5) if weighted else None
    backward = normgrad.group_norm_backward(dy, x, mean, rstd, weight, *sizes)
    return [*backward, *normgrad.group_norm(x, weight, weight, *sizes)]


@only_there
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("sizes", [(5, 6, 12, 3), (3, 6, 20, 2)])
def test_groups_loaded_a_turn_ahead_have_the_same_results(
    sizes: tuple[int, int, int, int], dtype: Any, weighted: bool, request: pytest.FixtureRequest
) -> None:
    alone = _results(sizes, dtype, weighted)
    kernels = request.getfixturevalue("clustered")
    for one, other in zip(alone, _results(sizes, dtype, weighted), strict=True):
        assert np.array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))
    assert set(kernels) == {"group_norm_backward", "group_norm_forward"}
