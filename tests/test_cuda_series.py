"""A kernel's launches in one call of native code: what the driver gets, from a driver that writes it down."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from normgrad.contract.dtypes import FLOAT32
from normgrad.cuda.cluster_occupancy import _occupancy
from normgrad.cuda.launch import Given, Options, Scratch, Step
from normgrad.cuda.series import DoesNotFit, Series, allow_cluster
from support.driver import Driver, at, current_stream, kernel, step

NAMES = ["input", "output"]
SIGNATURE = {
    "a": "*fp32",
    "b": "*fp32",
    "c": "i32",
    "d": ("i64", "constexpr"),
    "e": "constexpr",
    "f": "*fp32",
    "G": "constexpr",
}
ARGUMENTS = [Given("output", FLOAT32, True), Scratch(512, FLOAT32), -7, (2**40, 1), None, Given("input", FLOAT32, True)]
SIZES = (8, 8, 4, 8, 8, 8, 8)


def series(driver: Driver, *pairs: tuple[Step, Any]) -> Series:
    steps, kernels = zip(*pairs, strict=True)
    return Series(steps, kernels, NAMES, 0, 4096, driver, current_stream)


def test_the_driver_gets_every_launch() -> None:
    driver = Driver(*SIZES)
    first = step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE)
    second = (
        step(ARGUMENTS, {"G": 64}, (5, 1, 1)),
        kernel(SIGNATURE, 78, launch_pdl=True, launch_cooperative_grid=True, num_warps=8),
    )
    launches = series(driver, first, second)
    for workspace in (0x10000, 0x20001):  # the second one is rounded up to 256 bytes
        launches.launch([0x1000, 0x2000], workspace, 99)
    values = [0x2000, 0x10200, -7, 2**40, 0x1000, 0, 0]
    one, two, *later = driver.launches
    assert one == {
        "function": 77,
        "grid": (3, 2, 1),
        "block": (128, 1, 1),
        "shared": 1024,
        "stream": 99,
        "attributes": {},
        "values": [value % 2**64 if place != 2 else value for place, value in enumerate(values)],
    }
    assert two == one | {"function": 78, "grid": (5, 1, 1), "block": (256, 1, 1), "attributes": {6: 1, 2: 1}}
    assert [launch["values"][1] for launch in later] == [0x20100 + 512] * 2


def test_programs_are_launched_in_clusters() -> None:
    driver = Driver(*SIZES)
    clustered = replace(step(ARGUMENTS, {"G": 64}, (15, 1, 1)), options=Options(cluster=5))
    series(driver, (clustered, kernel(SIGNATURE, launch_pdl=True))).launch([0x1000, 0x2000], 0, 0)
    assert driver.launches[0]["attributes"] == {6: 1, 4: 5 | 1 << 32}
    assert driver.allowed == [(77, 8, 1024)]  # which counts where the slots make it more than 48 KiB


def test_clusters_without_room_are_not_launched() -> None:
    clustered = replace(step(ARGUMENTS, {"G": 64}), options=Options(cluster=3))
    with pytest.raises(DoesNotFit):
        series(Driver(*SIZES, status=1), (clustered, kernel(SIGNATURE)))


def test_only_large_clusters_have_to_be_allowed() -> None:
    driver = Driver()
    assert allow_cluster(driver, 77, 8, 512) == allow_cluster(driver, 77, 16, 512) == 0
    assert driver.allowed == [(77, 8, 512), (77, 8, 512), (77, 14, 1)]
    refusing = Driver(status=7)
    assert allow_cluster(refusing, 77, 16, 512) == 7
    assert _occupancy(refusing, 77, 16, 50000) == 0


class Occupancy:
    """Says of a question what was asked."""

    def __init__(self, status: int = 0) -> None:
        self.asked: list[int] = []
        self._status = status

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        assert (function.value, attribute) == (77, 8)
        self.asked.append(value)
        return 0

    def cuOccupancyMaxActiveClusters(self, found: Any, function: Any, configuration: Any) -> int:  # noqa: N802
        place = configuration.value
        attribute = at(place + 40)
        self.asked += [at(place + 24, ctypes.c_uint32), at(attribute, ctypes.c_uint32), at(attribute + 8)]
        found._obj.value = 30
        return self._status


def test_how_many_clusters_there_is_room_for() -> None:
    driver = Occupancy()
    assert _occupancy(driver, 77, 8, 50000) == 30
    assert driver.asked == [50000, 50000, 4, 8 | 1 << 32]
    assert _occupancy(Occupancy(status=1), 77, 8, 50000) == 0


@pytest.mark.parametrize("pointers", [0, 1, 2])
def test_as_many_null_pointers_as_the_kernel_takes(pointers: int) -> None:
    driver = Driver(*SIZES[:-2], *[8] * pointers)
    series(driver, (step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE))).launch([0x1000, 0x2000], 0, 0)
    assert driver.launches[0]["values"][-1 - pointers :] == [0x1000, *[0] * pointers]


def test_an_empty_grid_is_no_launch() -> None:
    driver = Driver(*SIZES)
    series(driver, (step(ARGUMENTS, {"G": 64}, (0, 1, 1)), kernel(SIGNATURE))).launch([1, 2], 0, 0)
    assert driver.launches == []


@pytest.mark.parametrize(
    ("sizes", "changed"),
    [
        (SIZES[:-3], {}),
        ((*SIZES, 8), {}),
        ((*SIZES[:-1], 4), {}),
        ((8, 8, 8, 8, 8, 8, 8), {}),
        (SIZES, {"num_ctas": 2}),
        (SIZES, {"global_scratch_size": 128}),
        (SIZES, {"profile_scratch_size": 128}),
    ],
)
def test_a_kernel_that_takes_something_else_is_left_to_triton(sizes: tuple[int, ...], changed: dict[str, int]) -> None:
    with pytest.raises(DoesNotFit):
        series(Driver(*sizes), (step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE, **changed)))


def test_a_type_that_is_not_known_is_left_to_triton() -> None:
    with pytest.raises(DoesNotFit):
        series(Driver(*SIZES), (step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE | {"c": "fp32"})))


def test_the_first_refusal_ends_the_series(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(*SIZES, status=1)
    monkeypatch.setattr("normgrad.cuda.series._words", lambda status: f"words for {status}")
    pair = step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE)
    with pytest.raises(RuntimeError, match="refused a launch: words for 1"):
        series(driver, pair, pair).launch([1, 2], 0, 0)
    assert len(driver.launches) == 1
