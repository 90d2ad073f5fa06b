"""What normgrad's modules and ``override()`` leave to PyTorch, and why.

There are two rules, and this is the only place where they stand:

eager
    A call is PyTorch's where normgrad cannot run it (:func:`obstacle`), and where PyTorch is faster in a training step
    (:func:`layer_norm_is_slower`, :func:`group_norm_is_slower`). On CUDA normgrad's kernels were faster in every
    measurement on an H200, in both directions and all memory formats; but its calls take the host longer, which decides
    where the GPU waits for the host, as it does for small tensors.
compiled
    Inductor fuses PyTorch's formula with the operations around it, and cannot fuse normgrad's operators. So a module
    becomes PyTorch's function, but for long rows on CUDA (:func:`compiles_to_layer_norm`).

The thresholds were measured by ``benchmarks/torch_tables.py``. A reason is a constant string, and counts as a key of
:meth:`normgrad.torch.override.report`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normgrad import backends
from normgrad.cuda import devices
from normgrad.torch.internals import constant_when_compiled
from normgrad.torch.outputs import DTYPES, DTYPES_OF_16_BITS, MAX_DIMENSIONS, memory_format

#: float32 on a CPU: below so many elements a step takes longer with our backward pass, and both passes are PyTorch's.
MIN_FLOAT32 = 1 << 20

#: The same for data in channels_last, on which PyTorch takes longer.
MIN_FLOAT32_CHANNELS_LAST = 1 << 19

#: 16-bit data beside float32 parameters on a CPU, contiguous, as under autocast. Between the other layers of a model
#: our calls find cold caches: Swin-T of two images took 3 % longer where its norms of 75,000 to 600,000 elements were
#: ours.
MIN_16_BITS = {torch.float16: 1 << 16, torch.bfloat16: 1 << 20}

#: float32 on a CPU: from so many elements on, where our outputs bypass the caches, our forward pass is faster.
MIN_FORWARD_FLOAT32 = 1 << 23

#: LayerNorm of 16-bit data on a CPU: from so many elements on our forward pass is faster.
MIN_FORWARD_16_BITS = 1 << 22

#: GroupNorm on a CPU: the forward pass of 16-bit data in channels_last is ours up to so many positions per channel.
MAX_FORWARD_POSITIONS = 256

#: GroupNorm on a CPU: the forward pass of contiguous float16 data is ours from so many elements on.
MIN_FORWARD_FLOAT16 = 1 << 16

#: CUDA: below so many elements a step is PyTorch's. A forward and a backward call of normgrad's took the host of an
#: H200 110 µs longer than PyTorch's, and the GPU 15 µs less for every million elements of float32; models that are not
#: bound by the host gain from fewer elements on.
MIN_CUDA = 1 << 22

#: The same for GroupNorm of data in channels_last, which PyTorch copies first.
MIN_CUDA_CHANNELS_LAST = 1 << 20

#: Compiled LayerNorm on CUDA: from so many columns on inductor's kernels reach 35 to 45 % of the bandwidth limit, and
#: ours win by more than the fusion that is lost.
MIN_COMPILED_COLUMNS = 8192

PYTORCH_IS_FASTER = "PyTorch is faster for so few elements"
DTYPE = "the data is not float32, float16 or bfloat16"
PARAMETERS = "the parameters are neither of the data's dtype nor float32"
DIMENSIONS = f"the data has more than {MAX_DIMENSIONS} dimensions"
DEVICE = "the device is neither a CPU nor CUDA"
REFUSED = "PyTorch refuses the arguments"


def obstacle(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """Return why normgrad cannot compute a call; None where it can."""
    dtype = input.dtype
    if dtype not in DTYPES:
        return DTYPE
    if input.is_cuda:
        problem = gpu_problem(input.device.index)
        if problem is not None:
            return problem
    elif not input.is_cpu:
        return DEVICE
    elif cpu_problem() is not None:
        return cpu_problem()
    if input.dim() > MAX_DIMENSIONS:
        return DIMENSIONS
    parameter = bias if weight is None else weight
    if parameter is None:
        return None
    taken = parameter.dtype in (dtype, torch.float32) and (bias is None or bias.dtype == parameter.dtype)
    return None if taken else PARAMETERS


@constant_when_compiled
def gpu_problem(index: int) -> str | None:
    """Return why normgrad's kernels do not run on a GPU; None where they do."""
    return devices.problem(index)


@constant_when_compiled
def cpu_problem() -> str | None:
    """Return why normgrad's kernels do not run on this machine's processor; None where they do."""
    return _cpu_problem()


@functools.cache
def _cpu_problem() -> str | None:
    try:
        backends.load("cpu")
    except ImportError as error:
        return f"the backend cpu cannot be loaded: {error}"
    return None


def layer_norm_is_slower(input: Tensor, weight: Tensor | None) -> bool:
    """Return whether PyTorch's two passes take less time than ours in a training step."""
    if input.is_cuda:
        return input.numel() < MIN_CUDA
    return input.is_cpu and input.numel() < _min_cpu(input, weight)


def group_norm_is_slower(input: Tensor, weight: Tensor | None) -> bool:
    """Return whether PyTorch's two passes take less time than ours in a training step."""
    if input.is_cuda:
        return input.numel() < (MIN_CUDA_CHANNELS_LAST if _may_be_channels_last(input) else MIN_CUDA)
    return input.is_cpu and input.numel() < _min_cpu(input, weight)


def _min_cpu(input: Tensor, weight: Tensor | None) -> int:
    """Return from how many elements on a call on a CPU is ours."""
    if input.dtype == torch.float32:
        return MIN_FLOAT32_CHANNELS_LAST if _may_be_channels_last(input) else MIN_FLOAT32
    if weight is None or weight.dtype != torch.float32 or _may_be_channels_last(input):
        return 0
    return MIN_16_BITS.get(input.dtype, 0)


def _may_be_channels_last(input: Tensor) -> bool:
    """Return whether images may be in channels_last. Of any other order PyTorch makes a copy, and is faster with it."""
    return input.dim() in (4, 5) and not input.is_contiguous()


def takes_layer_norm_forward(input: Tensor, weight: Tensor | None) -> bool:
    """Return whether the forward pass is ours too, where the backward pass is."""
    if not input.is_cpu or _has_16_bit_statistics(input, weight) or _is_streamed(input):
        return True
    return input.dtype in DTYPES_OF_16_BITS and input.numel() >= MIN_FORWARD_16_BITS


def takes_group_norm_forward(input: Tensor, positions: int, weight: Tensor | None) -> bool:
    """Return whether the forward pass is ours too, for channels of that many positions."""
    if not input.is_cpu or _has_16_bit_statistics(input, weight) or _is_streamed(input):
        return True
    if input.is_contiguous():
        return input.dtype == torch.float16 and input.numel() >= MIN_FORWARD_FLOAT16
    if not input.is_contiguous(memory_format=memory_format(input)):
        return True  # PyTorch's would need a copy
    return input.dtype in DTYPES_OF_16_BITS and positions <= MAX_FORWARD_POSITIONS


def _is_streamed(input: Tensor) -> bool:
    return input.dtype == torch.float32 and input.numel() >= MIN_FORWARD_FLOAT32


def _has_16_bit_statistics(input: Tensor, weight: Tensor | None) -> bool:
    """Return whether PyTorch would keep the statistics in 16 bits: it does unless a weight beside them is float32."""
    return weight is None and input.dtype in DTYPES_OF_16_BITS


def compiles_to_layer_norm(input: Tensor, normalized_shape: Sequence[int]) -> bool:
    """Return whether a compiled LayerNorm is our operator; a compiled GroupNorm is always PyTorch's.

    Nor is it ours where autocast would convert 16-bit data to float32 for it: inductor converts while it loads.
    """
    if not input.is_cuda or math.prod(normalized_shape) < MIN_COMPILED_COLUMNS:
        return False
    return input.dtype not in DTYPES_OF_16_BITS or not torch.is_autocast_enabled("cuda")
