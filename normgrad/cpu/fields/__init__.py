"""Offsets in the kernels' descriptors."""
