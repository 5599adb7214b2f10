"""MLA decode: selection, grid and parameter values."""
