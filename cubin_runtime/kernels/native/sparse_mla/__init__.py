"""MLA decode over lists of cache rows."""
