"""CUDA C++ of the native kernels and their build; needs a toolchain and is not part of the installed package."""
