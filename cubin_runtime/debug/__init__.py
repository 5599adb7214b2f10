"""Debugging tools above the operators: recorded calls and their replay, and traces for flashinfer-bench.

``observer`` sees each launch through the one hook of ``attention``; ``recorded`` writes calls with their contents,
``tracing`` without them.
"""
