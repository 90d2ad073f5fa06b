"""The threads that call a kernel: our own workers, or PyTorch's."""
