"""LLVM intrinsics that kernels are written with: loads, stores, atomics, vectors."""
