"""What a cubin says of itself."""
