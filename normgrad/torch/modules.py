"""``torch.nn``'s LayerNorm and GroupNorm on normgrad's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from normgrad.torch import functional
from normgrad.torch.outputs import DTYPES

#: What a module becomes under ``torch.compile``.
Compiled = Literal["auto", "normgrad"]


class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]
    """``torch.nn.LayerNorm``: the same arguments, parameters and state dict.

    Both passes run on normgrad's kernels if these are faster, with statistics that are float32 whatever the data
    is. Small tensors, float64, and devices other than CPU and CUDA are PyTorch's.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, bias, device, dtype
        As those of ``torch.nn.LayerNorm``.
    compiled : {"auto", "normgrad"}
        What the module becomes under ``torch.compile`` and ``torch.export``. ``"auto"``: PyTorch's function, which the
        compiler fuses with its neighbours, but for rows of 8192 elements and more on CUDA, where normgrad's operator is
        faster. ``"normgrad"``: always normgrad's operator, with the bits of ``torch.ops.normgrad.layer_norm``. Eager
        mode has these too where it leaves neither pass to PyTorch.
    autocast_dtype : torch.dtype
        The dtype of the output under autocast on CUDA: ``torch.float32``, as PyTorch's, or ``torch.bfloat16`` or
        ``torch.float16`` if the next layer would cast to it anyway. Without autocast it has no effect.

    Examples
    --------
    >>> import torch, normgrad.torch
    >>> norm = normgrad.torch.LayerNorm(4)
    >>> norm
    LayerNorm((4,), eps=1e-05, elementwise_affine=True...)
    >>> norm(torch.tensor([[0.0, 0.0, 2.0, 2.0]])).tolist()
    [[-0.99999..., -0.99999..., 0.99999..., 0.99999...]]
    """

    # Class attributes, so that a module that replace_norms has turned into this class has them too.
    compiled = "auto"
    autocast_dtype = torch.float32

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        compiled: Compiled = "auto",
        autocast_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        check_options(compiled, autocast_dtype)
        self.compiled = compiled
        self.autocast_dtype = autocast_dtype

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimensions."""
        if torch.jit.is_scripting():
            return torch.nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        if torch.compiler.is_compiling():
            return functional.compiled_layer_norm(
                input,
                self.normalized_shape,
                self.weight,
                self.bias,
                self.eps,
                self.compiled == "normgrad",
                self.autocast_dtype,
            )
        return functional.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, self.autocast_dtype
        )

    def extra_repr(self) -> str:
        """Return the arguments as ``repr`` shows them."""
        return super().extra_repr() + _shown(self)


class GroupNorm(torch.nn.GroupNorm):  # type: ignore[misc]
    """``torch.nn.GroupNorm``: the same arguments, parameters and state dict.

    Both passes run on normgrad's kernels if these are faster, with statistics that are float32 whatever the data
    is; data in channels_last stays so. Small tensors, float64, and devices other than CPU and CUDA are PyTorch's.

    Parameters
    ----------
    num_groups, num_channels, eps, affine, device, dtype
        As those of ``torch.nn.GroupNorm``.
    compiled : {"auto", "normgrad"}
        What the module becomes under ``torch.compile`` and ``torch.export``. ``"auto"``: PyTorch's function, which the
        compiler fuses with its neighbours. ``"normgrad"``: always normgrad's operator, with the bits of
        ``torch.ops.normgrad.group_norm``. Eager mode has these too where it leaves neither pass to PyTorch.
    autocast_dtype : torch.dtype
        The dtype of the output under autocast on CUDA: ``torch.float32``, as PyTorch's, or ``torch.bfloat16`` or
        ``torch.float16`` if the next layer would cast to it anyway. Without autocast it has no effect.
    **kwargs
        What else PyTorch's GroupNorm takes in the installed version (``bias``).

    Examples
    --------
    >>> import torch, normgrad.torch
    >>> norm = normgrad.torch.GroupNorm(2, 4)
    >>> norm
    GroupNorm(2, 4, eps=1e-05, affine=True...)
    >>> norm(torch.zeros(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)).stride()
    (16, 1, 8, 4)
    """

    compiled = "auto"
    autocast_dtype = torch.float32

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        compiled: Compiled = "auto",
        autocast_dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **kwargs)
        check_options(compiled, autocast_dtype)
        self.compiled = compiled
        self.autocast_dtype = autocast_dtype

    def forward(self, input: Tensor) -> Tensor:
        """Normalize every group of channels."""
        if torch.jit.is_scripting():
            return torch.nn.functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        if torch.compiler.is_compiling():
            return functional.compiled_group_norm(
                input,
                self.num_groups,
                self.weight,
                self.bias,
                self.eps,
                self.compiled == "normgrad",
                self.autocast_dtype,
            )
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.autocast_dtype)

    def extra_repr(self) -> str:
        """Return the arguments as ``repr`` shows them."""
        return super().extra_repr() + _shown(self)


def check_options(compiled: Any, autocast_dtype: Any) -> None:
    """Refuse arguments that a module cannot have, with a ValueError."""
    if compiled not in get_args(Compiled):
        raise ValueError(f"compiled is {compiled!r}, and must be {' or '.join(map(repr, get_args(Compiled)))}")
    if autocast_dtype not in DTYPES:
        raise ValueError(f"autocast_dtype is {autocast_dtype!r}, and must be torch.float32, bfloat16 or float16")


def _shown(module: LayerNorm | GroupNorm) -> str:
    compiled = "" if module.compiled == "auto" else f", compiled={module.compiled!r}"
    dtype = "" if module.autocast_dtype == torch.float32 else f", autocast_dtype={module.autocast_dtype}"
    return compiled + dtype
