"""Launches through cuda-bindings, with a driver that writes down what it is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
import triton

from normgrad.contract.dtypes import FLOAT32
from normgrad.cuda import backend
from normgrad.cuda.chip import Chip
from normgrad.cuda.driver_launch import (
    DriverLaunches,
    NotLaunchable,
    allow_cluster,
    cluster_occupancy,
    max_active_clusters,
    unchecked,
)
from normgrad.cuda.launch import Given, Options, Scratch, Step
from support.driver import INVALID_CONTEXT, STRUCTURES, Driver, kernel, step

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


@pytest.fixture(params=["stand-ins", "cuda-bindings"])
def structures(request: pytest.FixtureRequest) -> Any:
    """The driver's structures: NVIDIA's own where they are installed, which needs no driver."""
    return STRUCTURES if request.param == "stand-ins" else pytest.importorskip("cuda.bindings.driver")


def launches_of(driver: Any, *pairs: tuple[Step, Any]) -> DriverLaunches:
    steps, kernels = zip(*pairs, strict=True)
    return DriverLaunches(steps, kernels, NAMES, 0, driver)


def test_the_driver_gets_every_launch(structures: Any) -> None:
    driver = Driver(*SIZES, structures=structures)
    first = step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE, SIZES)
    second = (
        step(ARGUMENTS, {"G": 64}, (5, 1, 1)),
        kernel(SIGNATURE, SIZES, 78, launch_pdl=True, launch_cooperative_grid=True, num_warps=8),
    )
    launches = launches_of(driver, first, second)
    for workspace, stream in ((0x10000, 99), (0x20001, 100), (0x20001, 100)):  # rounded up to 256 bytes
        launches.launch([0x1000, 0x2000], workspace, stream)
    one, two, *later = driver.launches
    assert one == {
        "function": 77,
        "grid": (3, 2, 1),
        "block": (128, 1, 1),
        "shared": 1024,
        "stream": 99,
        "attributes": {},
        "values": [0x2000, 0x10200, -7, 2**40, 0x1000, 0, 0],
    }
    assert two == one | {"function": 78, "grid": (5, 1, 1), "block": (256, 1, 1), "attributes": {6: 1, 2: 1}}
    assert [launch["values"][1] for launch in later] == [0x20100 + 512] * 4
    assert [launch["stream"] for launch in later] == [100] * 4


def test_ctas_are_launched_in_clusters(structures: Any) -> None:
    driver = Driver(*SIZES, structures=structures)
    clustered = replace(step(ARGUMENTS, {"G": 64}, (15, 1, 1)), options=Options(cluster=5))
    launches_of(driver, (clustered, kernel(SIGNATURE, SIZES, launch_pdl=True))).launch([0x1000, 0x2000], 0, 0)
    assert driver.launches[0]["attributes"] == {6: 1, 4: (5, 1, 1)}
    assert driver.allowed == [(77, 8, 1024)]  # which counts where static shared memory makes it more than 48 KiB


def test_clusters_that_the_driver_refuses_are_not_launched(structures: Any) -> None:
    clustered = replace(step(ARGUMENTS, {"G": 64}), options=Options(cluster=3))
    with pytest.raises(NotLaunchable, match="no clusters of 3 CTAs: words for 1"):
        launches_of(Driver(*SIZES, status=1, structures=structures), (clustered, kernel(SIGNATURE, SIZES)))


def test_only_large_clusters_have_to_be_allowed(structures: Any) -> None:
    driver = Driver(structures=structures)
    for ctas in (8, 16):
        allow_cluster(driver, driver.CUfunction(77), ctas, 512)
    assert driver.allowed == [(77, 8, 512), (77, 8, 512), (77, 14, 1)]


def test_how_many_clusters_are_resident(structures: Any) -> None:
    driver = Driver(structures=structures)
    assert max_active_clusters(driver, 77, 8, 50000) == 30
    assert driver.allowed == [(77, 8, 50000)]
    asked = {"function": 77, "grid": (8, 1, 1), "shared": 50000, "attributes": {4: (8, 1, 1)}}
    assert driver.launches[0].items() >= asked.items()
    assert max_active_clusters(Driver(status=1, structures=structures), 77, 8, 50000) == 0


@pytest.mark.parametrize("pointers", [0, 1, 2])
def test_as_many_null_pointers_as_the_kernel_takes(pointers: int) -> None:
    sizes = *SIZES[:-2], *[8] * pointers
    driver = Driver(*sizes)
    launches_of(driver, (step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE, sizes))).launch([0x1000, 0x2000], 0, 0)
    assert driver.launches[0]["values"][-1 - pointers :] == [0x1000, *[0] * pointers]


def test_an_empty_grid_is_no_launch() -> None:
    driver = Driver(*SIZES)
    launches_of(driver, (step(ARGUMENTS, {"G": 64}, (0, 1, 1)), kernel(SIGNATURE, SIZES))).launch([1, 2], 0, 0)
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
def test_a_kernel_that_takes_something_else_is_not_launched(sizes: tuple[int, ...], changed: dict[str, int]) -> None:
    with pytest.raises(NotLaunchable):
        launches_of(Driver(*sizes), (step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE, sizes, **changed)))


def test_a_type_that_is_not_known_is_not_launched() -> None:
    with pytest.raises(NotLaunchable, match="fp32"):
        launches_of(Driver(*SIZES), (step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE | {"c": "fp32"}, SIZES)))


def test_what_another_triton_compiled_is_not_launched() -> None:
    compiled = kernel(SIGNATURE, SIZES)
    del compiled.metadata.launch_pdl
    with pytest.raises(NotLaunchable, match=r"another Triton or driver than was tried \(AttributeError: .*launch_pdl"):
        launches_of(Driver(*SIZES), (step(ARGUMENTS, {"G": 64}), compiled))
    compiled = kernel(SIGNATURE, SIZES)
    del compiled.asm["ptx"]
    with pytest.raises(NotLaunchable, match=r"another Triton or driver than was tried \(KeyError: 'ptx'"):
        launches_of(Driver(*SIZES), (step(ARGUMENTS, {"G": 64}), compiled))


def test_the_first_refusal_ends_the_launches() -> None:
    driver = Driver(*SIZES, status=1)
    pair = step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE, SIZES)
    launches = launches_of(driver, pair, pair)
    with pytest.raises(RuntimeError, match="refused a launch: words for 1"):
        launches.launch([1, 2], 0, 0)
    assert len(driver.launches) == 1
    driver.status = 0
    launches.launch([3, 4], 0, 0)
    assert [launch["values"][0] for launch in driver.launches[1:]] == [4, 4]


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(*SIZES, status=INVALID_CONTEXT)
    chosen: list[int] = []

    def set_device(device: int) -> None:
        chosen.append(device)
        driver.status = 0

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    pair = step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE, SIZES)
    DriverLaunches(*zip(pair, pair, strict=True), NAMES, 3, driver).launch([1, 2], 0, 0)
    assert chosen == [3]
    assert [launch["values"][0] for launch in driver.launches] == [2] * 3  # of which the first was refused
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    driver.status = INVALID_CONTEXT
    with pytest.raises(RuntimeError, match="words for 201"):
        launches_of(driver, pair).launch([1, 2], 0, 0)


def test_launches_are_prepared_in_the_context_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread has none. The driver would refuse the attributes of a kernel that another thread has loaded."""
    done: list[Any] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        done.append(f"device {index}")
        yield
        done.append("device of before")

    def plan(*_: Any) -> Any:
        done.append("plan")  # may ask how many clusters are resident
        return SimpleNamespace(steps=[], workspace_size=0)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.append(f"context of {index}"))
    monkeypatch.setattr(backend, "chip", lambda index: Chip(132))
    monkeypatch.setitem(backend.OPERATORS, "layer_norm", plan)
    monkeypatch.setattr(backend, "DriverLaunches", lambda *_: done.append("launches"))
    backend.backend.prepare(SimpleNamespace(device="cuda:3", signature=SimpleNamespace(name="layer_norm"), views={}))  # type: ignore[arg-type]
    assert done == ["device 3", "context of 3", "plan", "launches", "device of before"]


def test_threads_launch_with_addresses_and_streams_of_their_own(structures: Any) -> None:
    driver = Driver(*SIZES, structures=structures)
    pair = step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE, SIZES)
    launches = launches_of(driver, pair, pair)

    def work(number: int) -> None:
        for _ in range(200):
            launches.launch([1000 + number, 2000 + number], 0x1000 * number, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 4 * 200 * 2
    for launch in driver.launches:
        number = launch["stream"]
        assert launch["values"][:5] == [2000 + number, 0x1000 * number + 512, -7, 2**40, 1000 + number]


def test_a_launch_in_the_middle_of_another() -> None:
    """As a signal handler makes it."""

    class Interrupted(Driver):
        def cuLaunchKernelEx(self, *given: Any) -> tuple[int]:  # noqa: N802
            status = super().cuLaunchKernelEx(*given)
            if len(self.launches) == 1:
                launches.launch([5, 6], 0, 50)
            return status

    driver = Interrupted(*SIZES)
    pair = step(ARGUMENTS, {"G": 64}), kernel(SIGNATURE, SIZES)
    launches = launches_of(driver, pair, pair)
    launches.launch([1, 2], 0, 10)
    found = [(launch["values"][0], launch["stream"]) for launch in driver.launches]
    assert found == [(2, 10), (6, 50), (6, 50), (2, 10)]


def test_clusters_are_used_on_one_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert cluster_occupancy(0) is not None
    for capability in ((8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert cluster_occupancy(0) is None


@pytest.mark.parametrize(
    ("capability", "version", "problem"),
    [
        ((9, 0), "3.6.0", None),
        ((9, 0), "3.6.1+git", None),
        ((10, 0), "3.6.0", "compute capability 10.0 was not checked with them, 9.0 was"),
        ((9, 0), "3.7.1", "Triton 3.7.1 was not checked with them, 3.6.x was"),
    ],
)
def test_clusters_are_used_only_where_they_were_checked(
    capability: tuple[int, int], version: str, problem: str | None
) -> None:
    assert unchecked(capability, version) == problem
