"""``SyncBatchNorm``: BatchNorm whose statistics are those of the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from normgrad.torch.sync_batch_norm_function import Running, batch_norm_over_ranks


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """BatchNorm over the batches of all ranks, on CPU and CUDA; drop-in for ``torch.nn.SyncBatchNorm``.

    In training, with a process group of two ranks or more, mean and variance are those of the ranks' batches taken
    together, and so are the gradients. Ranks may have batches of different sizes, or empty ones. In evaluation,
    without an initialised process group and in a group of one rank it is BatchNorm.

    Parameters
    ----------
    num_features : int
        The number of channels: dimension 1 of inputs of two dimensions or more.
    eps : float
        Added to the variance.
    momentum : float or None
        How far the running statistics move at each step; None keeps the average of all steps.
    affine : bool
        Whether there are a weight and a bias.
    track_running_stats : bool
        Whether there are running statistics, for evaluation.
    process_group : ProcessGroup, optional
        The ranks that belong together; by default all.
    device, dtype
        Of parameters and buffers.
    **kwargs
        What else PyTorch's BatchNorm takes in the installed version (``bias``).

    Notes
    -----
    The gradients of weight and bias are those of this rank's batch, for DistributedDataParallel to average.

    Examples
    --------
    >>> import torch
    >>> from normgrad.torch import SyncBatchNorm
    >>> norm = SyncBatchNorm(3)
    >>> norm
    SyncBatchNorm(3, eps=1e-05, momentum=0.1, affine=True, ...track_running_stats=True)
    >>> norm(torch.randn(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **kwargs)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels (got an input of the shape {tuple(input.shape)})")

    def _group_of_several(self) -> Any:
        """Return the process group whose ranks exchange statistics; None where there is one rank."""
        if not self.training or not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD if self.process_group is None else self.process_group
        return group if dist.get_world_size(group) > 1 else None

    def forward(self, input: Tensor) -> Tensor:
        """Normalize: in training by the statistics of all ranks, in evaluation by the running ones."""
        group = self._group_of_several()
        if group is None:
            output: Tensor = super().forward(input)
            return output
        self._check_input_dim(input)
        running = self._next_running() if self.track_running_stats else Running()
        return batch_norm_over_ranks(input, self.weight, self.bias, running, self.eps, group)

    def _next_running(self) -> Running:
        """Count a step, and return how far the running statistics move in it."""
        self.num_batches_tracked.add_(1)
        # In float64: the reciprocal of an integer tensor is float32.
        momentum = self.num_batches_tracked.double().reciprocal() if self.momentum is None else self.momentum
        return Running(self.running_mean, self.running_var, momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """Replace the BatchNorm layers of a model; see :func:`convert_sync_batchnorm`."""
        for name, layer in module.named_modules():
            _check_convertible(cls, name or "the module", layer)
        return _converted(cls, module, process_group, {})


def convert_sync_batchnorm(module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
    """Replace the BatchNorm layers of a model by synchronised ones.

    ``BatchNorm1d``, ``2d`` and ``3d`` and ``torch.nn.SyncBatchNorm`` become :class:`SyncBatchNorm`, with the same
    parameters, buffers and training flag; a layer that is used twice stays one. A layer with a ``forward`` of its own,
    and one whose weight or bias is computed, is refused with a ValueError, before anything is changed: what it does
    besides would be lost. Hooks are not carried over, as by PyTorch's conversion.

    Parameters
    ----------
    module : Module
        The model; it is changed in place.
    process_group : ProcessGroup, optional
        The ranks that belong together; by default all, or those of a layer that is synchronised already.

    Returns
    -------
    Module
        The model, or the new layer where the model itself is a BatchNorm.

    Examples
    --------
    >>> import torch
    >>> from normgrad.torch import convert_sync_batchnorm
    >>> convert_sync_batchnorm(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)))
    Sequential(
      (0): Linear(in_features=4, out_features=2, bias=True)
      (1): SyncBatchNorm(2, eps=1e-05, momentum=0.1, affine=True, ...track_running_stats=True)
    )
    """
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)


def _check_convertible(cls: type[SyncBatchNorm], name: str, layer: torch.nn.Module) -> None:
    if isinstance(layer, cls) or not isinstance(layer, _BatchNorm):
        return
    if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
        raise ValueError(
            f"{name} is a {type(layer).__name__}, which has no number of channels yet: "
            "run the model once, then convert it"
        )
    computed = next((one for one in ("weight", "bias") if one not in layer._parameters), None)
    if computed is not None:
        raise ValueError(
            f"{name} is a {type(layer).__name__}, whose {computed} is no parameter, as after pruning or in a "
            "parametrization, and would be computed no more: make it one, as torch.nn.utils.prune.remove does"
        )
    if type(layer).forward not in _FORWARDS or "forward" in vars(layer):
        raise ValueError(
            f"{name} is a {type(layer).__name__}, whose forward is its own and would be replaced by that of BatchNorm: "
            "convert it by hand, or with the converter of the library that it is from"
        )


_FORWARDS = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward, SyncBatchNorm.forward)


def _converted(
    cls: type[SyncBatchNorm], module: torch.nn.Module, process_group: Any, done: dict[torch.nn.Module, torch.nn.Module]
) -> torch.nn.Module:
    if module in done:
        return done[module]
    done[module] = output = _synchronised(cls, module, process_group) if isinstance(module, _BatchNorm) else module
    for name, child in module._modules.items():
        if child is not None:
            output._modules[name] = _converted(cls, child, process_group, done)
    return output


def _synchronised(cls: type[SyncBatchNorm], norm: Any, process_group: Any) -> SyncBatchNorm:
    """Return a layer with the parameters and buffers of a BatchNorm."""
    if isinstance(norm, cls):
        norm.process_group = norm.process_group if process_group is None else process_group
        return norm
    without_bias = norm.affine and norm.bias is None
    output = cls(
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
        getattr(norm, "process_group", None) if process_group is None else process_group,
        device="meta",
        **({"bias": False} if without_bias else {}),
    )
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(output, name, getattr(norm, name))
    return output.train(norm.training)
