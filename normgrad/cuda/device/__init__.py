"""The Triton kernels. Each says in its docstring what one program does; shapes stand beside the pointers."""
