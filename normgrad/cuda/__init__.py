"""The operators on NVIDIA GPUs, in Triton.

From a call to the GPU: ``backend.prepare`` asks an operator family for the launches of a problem, compiles them, and
hands them to ``driver_launch``. One folder per family has the host side and the kernels together:

``layer_norm``, ``group_norm``, ``batch_norm``
    ``launches`` (which kernels, on which operands), ``tiles`` (tile sizes, with the measurements that chose them),
    ``*kernels`` (the kernels) and ``addressing`` (pointers and masks of a tile; GroupNorm's are beside its kernels)

What follows from the choice of a tile reaches a kernel as one constexpr, a frozen dataclass (``…Spec``) with plain
fields only: Triton's cache key of a kernel has their values, but not the code of a property.

Shared by all families, on the host:

``chip``               properties of a GPU that tile sizes depend on, and integer helpers
``operands``           tensors as kernels see them: strides, alignment, packing of 16-bit elements
``steps``              the launches of a call while they are collected; copies, workspace, second-stage reductions
``cta_groups``         CTAs that share rows or groups: cluster, cooperative launch, or two launches
``launch``             one launch: how it is compiled
``layout_checks``      whether a compiled kernel has the layouts that it relies on
``driver_launch``      all launches of a call through NVIDIA's cuda-bindings, and how many clusters fit on a GPU
``plain``              the formulas in PyTorch's operations, where kernels cannot be used
``devices``            which GPUs the kernels run on, and why not on others

and on the device: ``device`` (functions of several kernels) and ``helper_kernels``.
"""
