"""Everything about bytes on disk: paths, manifests, pins, sources, the store and what a cubin says of itself."""
