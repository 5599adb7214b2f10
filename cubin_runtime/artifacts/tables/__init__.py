"""What a release says of its kernels."""
