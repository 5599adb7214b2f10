"""Facts about a cubin, read from its ELF."""
