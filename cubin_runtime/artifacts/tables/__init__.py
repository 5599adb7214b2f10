"""The kernel metadata of a release."""
