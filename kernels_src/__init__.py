"""CUDA C++ of our own kernels and their build; needs a toolchain, and is no part of the installed package."""
