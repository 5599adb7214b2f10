"""Context-parallel decode measured: the problems, times of several ranks, and a model for more GPUs."""
