"""NVIDIA's trtllm-gen kernels: which one a call launches, on what grid and with which parameters.

A call (``calls``) states a ``Problem``. ``select`` chooses the kernel (``kernel_finder``, ``tile_size``, ``grid``),
``tensor_maps`` describes the tensors, ``parameter_values`` fills the struct of ``params``, ``reduction`` adds the
launches that follow, and ``decision`` holds the result. Nothing here touches a driver: the number of clusters that
fit comes from a callback, and TMA descriptors stay specs.
"""
