"""The method of all attention benchmarks: attention timed inside a sequence of layers."""
