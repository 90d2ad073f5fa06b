"""normgrad in PyTorch: modules, ``override``, and the operators of ``torch.ops.normgrad``, registered by the import."""

try:
    import torch as _torch  # noqa: F401 - the error says how to get it
except ModuleNotFoundError as error:
    raise ImportError("normgrad.torch needs PyTorch, which is not installed: pip install 'normgrad[torch]'") from error

import normgrad.torch.library  # noqa: F401 - registers the operators
from normgrad.torch.aten_override import override
from normgrad.torch.modules import GroupNorm, LayerNorm
from normgrad.torch.replace import Replacement, replace_norms
from normgrad.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "GroupNorm",
    "LayerNorm",
    "Replacement",
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "override",
    "replace_norms",
]
