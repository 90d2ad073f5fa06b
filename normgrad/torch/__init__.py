"""normgrad in PyTorch. Importing this module registers the operators of ``torch.ops.normgrad``."""

import normgrad.torch.library  # noqa: F401 - registers the operators
from normgrad.torch.overriding import override

__all__ = ["override"]
