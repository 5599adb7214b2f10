"""Our own kernels: which one fits, and the parameters it takes."""
