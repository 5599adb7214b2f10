"""Packing the masks of draft tokens on the device."""
