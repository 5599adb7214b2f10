"""Context attention (prefill): selection, grid and parameter values."""
