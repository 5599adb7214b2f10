"""The trtllm-gen kernels that NVIDIA publishes: the parameter struct of their ABI."""
