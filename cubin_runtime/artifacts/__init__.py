"""Everything about bytes on disk: paths, manifests, pins, sources, the store and what cubins say."""
