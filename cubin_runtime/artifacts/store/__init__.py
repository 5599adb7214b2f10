"""The store, which keeps verified objects."""
