"""The kernels that follow a trtllm-gen launch."""
