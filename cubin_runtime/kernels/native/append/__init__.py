"""KV append: new keys and values into a paged cache."""
