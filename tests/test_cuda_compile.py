"""Every launch compiles for a Hopper GPU, and its PTX and layouts are as the kernels rely on; no GPU is needed."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.contract.check import check
from normgrad.contract.plan import Problem
from normgrad.operators.mixed import MIXED
from normgrad.testing.expected import as_tuple

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from normgrad.cuda.layout_checks import check_layouts, reductions

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter is on, and compiles nothing"
)

ROWS, LONG_ROWS, NARROW_ROWS, IMAGES, LARGE_IMAGES = (6, 300), (2, 20000), (70, 17), (3, 5, 49), (32, 5, 2048)
# N, C, HxW of segment tiles: of whole channels, and of any.
FEW_POSITIONS = [(64, 32, 49), (8, 8, 1101)]
# N, C, HxW, group: tiny groups; several of more than 512 elements in a CTA; one in a CTA; parts of one, with masks;
# positions that are loaded one by one.
GROUPS = (2, 12, 50, 4)
MORE_GROUPS = [(2, 64, 49, 4), (2, 16, 3136, 8), (2, 24, 3600, 2), (2, 20000, 1, 1), (1, 3, 3137, 1)]
# Rows of an odd number of elements; rows that CTAs share; one odd channel a group.
MORE_GROUPS += [(2, 6, 49, 2), (2, 8, 3025, 2), (2, 8, 77, 8)]
# Groups of strided positions, of which a warp holds several channels.
STRIDED_GROUPS = [(1, 60, 2047, 1), (2, 16, 3136, 8)]


def _data(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool = False) -> Any:
    made = torch.zeros(shape, dtype=dtype)
    return made.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else made


def _strided_positions(dtype: torch.dtype) -> list[tuple[str, dict[str, tuple[Any, ...]]]]:
    """GroupNorm of positions with stride 2, and with stride 0."""
    found = []
    for N, C, HxW, group in STRIDED_GROUPS:
        x = torch.zeros((N, C, 2 * HxW), dtype=dtype)[:, :, ::2]
        found.append((f"strided-{N}x{C}x{HxW}x{group}", _group_norm_of(x, group)))
    return [*found, ("expanded", _group_norm_of(torch.zeros((2, 512, 1), dtype=dtype).expand(2, 512, 64), 4))]


def _vector(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def _layer_norm(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    return _layer_norm_of(_data(shape, dtype))


def _layer_norm_of(x: Any) -> dict[str, tuple[Any, ...]]:
    *outer, N = x.shape
    statistics, weight = (_vector(*outer, 1),) * 2, _data((N,), x.dtype)
    return {
        "layer_norm_backward": (x, x, [N], *statistics, weight),
        "layer_norm": (x, [N], weight, weight),
    }


def _group_norm(
    dtype: torch.dtype, channels_last: bool, sizes: tuple[int, int, int, int] = GROUPS
) -> dict[str, tuple[Any, ...]]:
    return _group_norm_of(_data(sizes[:3], dtype, channels_last), sizes[3])


def _group_norm_of(x: Any, group: int) -> dict[str, tuple[Any, ...]]:
    weight, statistics, sizes = _data((x.shape[1],), x.dtype), (_vector(x.shape[0], group),) * 2, (*x.shape, group)
    return {
        "group_norm_backward": (x, x, *statistics, weight, *sizes),
        "group_norm": (x, weight, weight, *sizes),
    }


def _batch_norm(
    dtype: torch.dtype, channels_last: bool, shape: tuple[int, int, int] = IMAGES
) -> dict[str, tuple[Any, ...]]:
    x, v = _data(shape, dtype, channels_last), _vector(shape[1])
    many, counts = _vector(4, shape[1]), np.ones(4, np.int32)
    return {
        "batch_norm_elemt_backward": (x, x, v, v, v, v, v, counts),
        "batch_norm_elemt": (x, v, v, v, v),
        "batch_norm_stats": (x,),
        "batch_norm_reduce_backward": (x, x, v, v, v),
        "batch_norm_gather_stats_with_counts": (x, many, many, v.copy(), v.copy(), 0.1, 1e-5, counts),
    }


CALLS = [
    pytest.param(operator, arguments, id=f"{operator}-{label}-{dtype}".replace("torch.", ""))
    for dtype in (torch.bfloat16, torch.float32)
    for label, calls in [
        ("rows", _layer_norm(ROWS, dtype)),
        ("long", _layer_norm(LONG_ROWS, dtype)),
        ("narrow", _layer_norm(NARROW_ROWS, dtype)),
        ("strided-columns", _layer_norm_of(_data(ROWS[::-1], dtype).T)),
        ("transposed", _layer_norm_of(_data((5, 4, 768), dtype).transpose(0, 1))),
        ("permuted", _layer_norm_of(_data((5, 4, 3, 768), dtype).permute(2, 1, 0, 3))),
        ("contiguous", _group_norm(dtype, False) | _batch_norm(dtype, False)),
        ("channels_last", _group_norm(dtype, True) | _batch_norm(dtype, True)),
        *(("x".join(map(str, sizes)), _group_norm(dtype, False, sizes)) for sizes in MORE_GROUPS),
        *_strided_positions(dtype),
        *(("x".join(map(str, sizes)), _batch_norm(dtype, False, sizes)) for sizes in FEW_POSITIONS),
        ("contiguous-parts", _batch_norm(dtype, False, LARGE_IMAGES)),
        ("channels_last-parts", _batch_norm(dtype, True, LARGE_IMAGES)),
    ]
    for operator, arguments in calls.items()
]


def _chip_with_clusters() -> Any:
    """A chip all of whose multiprocessors have room for clusters."""
    from normgrad.cuda.chip import Chip

    return Chip(132, max_active_clusters=lambda cluster, ctas_per_sm: 132 * ctas_per_sm // cluster)


def _problem(
    operator: str, arguments: tuple[Any, ...], out: tuple[Any, ...] | None = None, mixed: bool = False
) -> Problem:
    """Return the problem of a call; its outputs are allocated as a plain call would, where none are given."""
    called = MIXED[operator] if mixed else getattr(normgrad, operator)
    if out is None:
        out = as_tuple(called(*arguments))
    named, out, _ = called._arguments(arguments, {"out": out})
    call = check(called.signature, named | called._outputs(out), None, outputs_needed=True)
    return Problem(called.signature, call.views, call.attributes)


@pytest.mark.parametrize(("operator", "arguments"), CALLS)
@pytest.mark.parametrize("cooperative", [True, False], ids=["cooperative", "two-launches"])
def test_every_launch_compiles(
    operator: str, arguments: tuple[Any, ...], cooperative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normgrad.cuda.backend import OPERATORS
    from normgrad.cuda.chip import Chip
    from normgrad.cuda.driver_launch import parameter_sizes, parameters_of

    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    problem = _problem(operator, arguments)
    steps = OPERATORS[operator](problem, Chip(132, cooperative_launch=cooperative)).steps
    assert steps
    for step in steps:
        kernel = compile(_source(step), GPUTarget("cuda", 90, 32), step.options.as_arguments())
        assert kernel.asm["cubin"]
        check_layouts(kernel.asm)
        # Triton adds two pointers, to scratch memory that these kernels do not use.
        assert [*(size for size, _ in parameters_of(step, kernel)), 8, 8] == parameter_sizes(kernel)
        if step.options.ctas_per_sm:  # CTAs that wait for each other must be resident at once
            assert step.options.ctas_per_sm * (kernel.metadata.shared + 1024) <= 228 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("operator", ["batch_norm_elemt_backward", "batch_norm_elemt"])
def test_elementwise_kernels_load_everything_before_the_first_barrier(
    operator: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load behind a barrier waits for all loads before it, so that latencies add up."""
    from normgrad.cuda.backend import OPERATORS

    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    problem = _problem(operator, _batch_norm(dtype, False, (64, 512, 196))[operator])
    (step,) = OPERATORS[operator](problem, _chip_with_clusters()).steps
    ptx = compile(_source(step), GPUTarget("cuda", 90, 32), step.options.as_arguments()).asm["ptx"]
    _, _, behind = ptx.partition("bar.sync")
    assert "ld.global" not in behind


# Compute capability, and bytes of shared memory per SM: A100; RTX 30; L4, L40 and RTX 40; B200; RTX 50.
OTHER_GPUS = [(80, 164), (86, 100), (89, 100), (100, 228), (120, 100)]


@pytest.mark.parametrize(("capability", "shared_memory"), OTHER_GPUS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_compile_for_other_gpus(
    capability: int, shared_memory: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normgrad.cuda.backend import OPERATORS
    from normgrad.cuda.chip import Chip

    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    chip = Chip(108, shared_memory=shared_memory * 1024)
    calls = [*_layer_norm(ROWS, dtype).items(), *_layer_norm(LONG_ROWS, dtype).items()]
    for channels_last in (False, True):
        calls += [*_group_norm(dtype, channels_last).items(), *_batch_norm(dtype, channels_last).items()]
    calls += [*_group_norm(dtype, False, (2, 64, 49, 4)).items(), *_group_norm(dtype, False, (2, 16, 3136, 8)).items()]
    for operator, arguments in calls:
        for step in OPERATORS[operator](_problem(operator, arguments), chip).steps:
            options = step.options.as_arguments(pdl_supported=capability >= 90)
            kernel = compile(_source(step), GPUTarget("cuda", capability, 32), options)
            assert kernel.asm["cubin"]
            check_layouts(kernel.asm)
            assert kernel.metadata.shared <= (shared_memory - 1) * 1024


@pytest.mark.parametrize(("operator", "arguments"), CALLS)
def test_every_launch_compiles_with_64_bit_offsets(
    operator: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from normgrad.cuda.backend import OPERATORS

    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    for step in OPERATORS[operator](_problem(operator, arguments), _chip_with_clusters()).steps:
        if hasattr(step.constants.get("TILE"), "offset64"):
            large = replace(step, constants={**step.constants, "TILE": replace(step.constants["TILE"], offset64=True)})
            assert compile(_source(large), GPUTarget("cuda", 90, 32), large.options.as_arguments()).asm["cubin"]


CLUSTERS = [
    pytest.param(operator, arguments, id=f"{operator}-{columns}-{dtype}".replace("torch.", ""))
    for columns, dtypes in [
        (1280, (torch.bfloat16, torch.float32)),
        (5001, (torch.bfloat16,)),
        (8192, (torch.float16, torch.float32)),
        (10000, (torch.bfloat16, torch.float32)),
        (16384, (torch.bfloat16,)),
        (32768, (torch.bfloat16,)),
        (65536, (torch.float16,)),
    ]
    for dtype in dtypes
    for operator, arguments in _layer_norm((480, columns), dtype).items()
]
# N, C, HxW, group: parts of many channels, some beyond the group; of two channels; of channels and positions; with
# masks. In float32 only groups of up to 65536 elements.
GROUPS_IN_CLUSTERS = [(2, 40, 256, 1), (2, 18, 1024, 2), (2, 20, 4096, 2), (2, 8, 16384, 1), (2, 12, 3600, 1)]
CLUSTERS += [
    pytest.param(operator, arguments, id=f"{operator}-{'x'.join(map(str, sizes))}-{dtype}".replace("torch.", ""))
    for sizes in GROUPS_IN_CLUSTERS
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for operator, arguments in _group_norm(dtype, False, sizes).items()
    if dtype != torch.float32 or sizes != (2, 8, 16384, 1)
]


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize(("operator", "arguments"), CLUSTERS)
def test_each_sum_is_sent_once_to_every_cta_of_a_cluster(
    operator: str, arguments: tuple[Any, ...], strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sending threads hold all values, and no value is sent twice: the receiver's mbarrier counts the bytes."""
    from normgrad.cuda.backend import OPERATORS
    from normgrad.cuda.device.cluster_exchange import MAX_CLUSTER_WARPS, MAX_ROWS

    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    chip = _chip_with_clusters()
    if strided:
        *outer, inner = arguments[0].shape
        data = torch.zeros(*outer, 2 * inner, dtype=arguments[0].dtype)[..., ::2]
        arguments = tuple(data if argument is arguments[0] else argument for argument in arguments)
    steps = OPERATORS[operator](_problem(operator, arguments), chip).steps
    in_clusters = [step for step in steps if step.options.cluster > 1]
    in_place = not strided or operator.startswith("layer_norm")  # rows with strided columns are copied first
    assert bool(in_clusters) == in_place or operator == "layer_norm"
    for step in in_clusters:
        assert step.grid[0] % step.options.cluster == 0
        assert step.grid[0] <= 132 * step.options.ctas_per_sm
        kernel = compile(_source(step), GPUTarget("cuda", 90, 32), step.options.as_arguments())
        check_layouts(kernel.asm)
        ptx = kernel.asm["ptx"]
        assert ptx.count("st.async") == getattr(step.constants["TILE"], "rows", 1) <= MAX_ROWS
        assert ptx.count("expect_tx") == ptx.count("try_wait") == 1
        if operator == "layer_norm_backward":
            assert step.options.cluster * step.options.warps <= MAX_CLUSTER_WARPS
            assert "bar.sync" not in _loop_around(ptx, "st.async")
            # A shuffle in inline assembly would mix rows: Triton may rematerialize its operand in a layout where lanes
            # hold different rows.
            assert "shfl" not in kernel.asm["ttgir"]
        else:
            _check_cta_exchange(step, ptx)
        assert step.options.ctas_per_sm * (kernel.metadata.shared + _exchange_bytes(ptx) + 1024) <= 228 * 1024


def _check_cta_exchange(step: Any, ptx: str) -> None:
    """Two sets of slots, of one for each row and CTA, follow the two mbarriers; a thread sends to each CTA."""
    from normgrad.cuda.device.cluster_exchange import MAX_EXCHANGE_CLUSTER

    slots = step.options.cluster * getattr(step.constants["TILE"], "rows", 1)
    assert _exchange_bytes(ptx) >= 16 + 2 * 16 * slots
    assert step.options.cluster <= MAX_EXCHANGE_CLUSTER <= 32 * step.options.warps


@pytest.mark.parametrize("wide", ["data", "gradients and output"])
@pytest.mark.parametrize("sizes", GROUPS_IN_CLUSTERS)
@pytest.mark.parametrize("operator", ["group_norm", "group_norm_backward"])
def test_groups_of_mixed_dtypes_in_clusters(
    operator: str, sizes: tuple[int, int, int, int], wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normgrad.cuda.backend import OPERATORS

    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    dtype, other = (torch.float32, torch.bfloat16) if wide == "data" else (torch.bfloat16, torch.float32)
    (x, *_), *_ = _group_norm(dtype, False, sizes).values()
    weight, statistics = _vector(sizes[1]), (_vector(sizes[0], sizes[3]),) * 2
    y = _data(sizes[:3], other)
    if operator == "group_norm":
        arguments, out = (x, weight, weight, *sizes), (y, *(value.copy() for value in statistics))
    else:
        arguments, out = (y, x, *statistics, weight, *sizes), (_data(sizes[:3], dtype), weight.copy(), weight.copy())
    steps = OPERATORS[operator](_problem(operator, arguments, out, mixed=True), _chip_with_clusters()).steps
    assert (steps[0].options.cluster > 1) == (sizes != (2, 8, 16384, 1) or (operator, wide) == NARROW_FORWARD)
    for step in steps:
        kernel = compile(_source(step), GPUTarget("cuda", 90, 32), step.options.as_arguments())
        check_layouts(kernel.asm)
        if step.options.cluster > 1:
            _check_cta_exchange(step, kernel.asm["ptx"])
            used = kernel.metadata.shared + _exchange_bytes(kernel.asm["ptx"]) + 1024
            assert step.options.ctas_per_sm * used <= 228 * 1024


#: What reads 16-bit data alone has room for the largest groups.
NARROW_FORWARD = ("group_norm", "gradients and output")


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(("operator", "arguments"), CALLS)
def test_ctas_that_wait_for_each_other_are_resident(
    operator: str, arguments: tuple[Any, ...], clusters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA guarantees no order in which CTAs start: only a cluster or a cooperative launch has all resident at once."""
    from normgrad.cuda.backend import OPERATORS
    from normgrad.cuda.chip import Chip
    from normgrad.cuda.device.mailbox import FUSED

    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    chip = _chip_with_clusters() if clusters else Chip(132)
    for step in OPERATORS[operator](_problem(operator, arguments), chip).steps:
        parts = getattr(step.constants.get("TILE"), "parts", 1)
        if parts > 1 and step.constants["PHASE"] == FUSED.value:
            waits = "WANT" not in step.constants or step.constants["WANT"].input
            assert not waits or step.options.cooperative or step.options.cluster == parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("operator", "columns"),
    [("layer_norm_backward", columns) for columns in (16, 100, 300, 1001, 1024, 5120)] + [("layer_norm", 100)],
)
def test_the_order_of_a_row_sum_does_not_depend_on_the_number_of_rows(
    operator: str, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normgrad.cuda.backend import OPERATORS

    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    chip = _chip_with_clusters()
    rows, found = [], []
    for M in (3, 3000):
        problem = _problem(operator, _layer_norm((M, columns), dtype)[operator])
        step = max(OPERATORS[operator](problem, chip).steps, key=lambda step: "TILE" in step.constants)
        code = compile(_source(step), GPUTarget("cuda", 90, 32), step.options.as_arguments()).asm["ttgir"]
        rows.append(step.constants["TILE"].rows)
        found.append(_columns_by_thread(code))
    assert found[0] == found[1] != []
    assert rows[0] < rows[1] or columns == 1001


def _columns_by_thread(code: str) -> list[dict[str, list[list[int]]]]:
    """Return for every reduction over columns which of them the bits of register, lane and warp step along."""
    layouts = [bases for axis, _, bases in reductions(code) if axis != 0]
    return [
        {level: [basis[1:] for basis in bases if any(basis[1:])] for level, bases in one.items()} for one in layouts
    ]


def _loop_around(ptx: str, instruction: str) -> str:
    """Return the code of the innermost loop with an instruction."""
    at = ptx.index(instruction)
    begins = {match[1]: match.start() for match in re.finditer(r"^(\$L\w+):", ptx, re.M)}
    ends = [(match.start(), begins[match[1]]) for match in re.finditer(r"bra\S*\s+(\$L\w+);", ptx)]
    loops = [ptx[begin:end] for end, begin in ends if begin < at < end]
    return min(loops, key=len)


def _exchange_bytes(ptx: str) -> int:
    """Return the bytes of exchange buffers: shared memory that Triton does not know of."""
    return sum(int(size) for size in re.findall(r"\.shared \.align 16 \.b8 exchange\[(\d+)\]", ptx))


def _source(step: Any) -> ASTSource:
    """Return a step's kernel, specialized on its arguments as Triton's own launch would do it."""
    from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32
    from normgrad.cuda.launch import FLOAT64, INT64, Given, Scratch

    names = {BFLOAT16: "*bf16", FLOAT16: "*fp16", FLOAT32: "*fp32", INT32: "*i32", INT64: "*i64", FLOAT64: "*fp64"}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}

    def described(argument: Any, path: tuple[int, ...]) -> Any:
        if isinstance(argument, tuple):
            return tuple(described(item, (*path, index)) for index, item in enumerate(argument))
        if isinstance(argument, Given | Scratch):
            if isinstance(argument, Scratch) or argument.aligned:
                attributes[path] = [["tt.divisibility", 16]]
            return names[argument.dtype]
        if argument is None or argument == 1:
            constants[path] = argument
            return "constexpr"
        if argument % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if abs(argument) < 2**31 else "i64"

    parameters = step.kernel.arg_names
    signature = {
        name: described(argument, (index,))
        for index, (name, argument) in enumerate(zip(parameters, step.arguments, strict=False))
    }
    for name, value in step.constants.items():
        signature[name] = "constexpr"
        constants[(parameters.index(name),)] = value
    return ASTSource(step.kernel, signature, constants, attributes)
