"""normgrad in PyTorch. Importing this module registers the operators of ``torch.ops.normgrad``."""

import normgrad.torch.library  # noqa: F401 - registers the operators
from normgrad.torch.overriding import override
from normgrad.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm", "override"]
