"""Everything about the CUDA driver: structs, descriptors, the ABI gate, modules and launches; no network."""
