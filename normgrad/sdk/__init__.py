"""The C interface: programs written for CANN's operators build against it and run with no NPU."""

from normgrad.sdk.tree import SdkError, build

__all__ = ["SdkError", "build"]
