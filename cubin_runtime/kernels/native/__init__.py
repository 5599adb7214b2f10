"""The kernels of this project: which one fits, and the parameters it takes."""
