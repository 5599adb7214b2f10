"""Paged decode: selection, grid and parameter values."""
