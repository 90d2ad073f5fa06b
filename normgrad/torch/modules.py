"""``torch.nn``'s LayerNorm and GroupNorm with our backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from normgrad.torch import functional


class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]
    """``torch.nn.LayerNorm``: the same arguments, parameters and state dict.

    The backward pass is normgrad's, with statistics that are float32 whatever the data is. float64, and devices
    other than CPU and CUDA, are PyTorch's.

    Examples
    --------
    >>> import torch, normgrad.torch
    >>> norm = normgrad.torch.LayerNorm(4)
    >>> norm
    LayerNorm((4,), eps=1e-05, elementwise_affine=True...)
    >>> norm(torch.tensor([[0.0, 0.0, 2.0, 2.0]])).tolist()
    [[-0.99999..., -0.99999..., 0.99999..., 0.99999...]]
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimensions."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(torch.nn.GroupNorm):  # type: ignore[misc]
    """``torch.nn.GroupNorm``: the same arguments, parameters and state dict.

    The backward pass is normgrad's, with statistics that are float32 whatever the data is; data in channels_last
    stays so. float64, and devices other than CPU and CUDA, are PyTorch's.

    Examples
    --------
    >>> import torch, normgrad.torch
    >>> norm = normgrad.torch.GroupNorm(2, 4)
    >>> norm
    GroupNorm(2, 4, eps=1e-05, affine=True...)
    >>> norm(torch.zeros(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)).stride()
    (16, 1, 8, 4)
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise every group of channels."""
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
