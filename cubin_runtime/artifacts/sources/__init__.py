"""The sources of bytes; none of them is trusted."""
