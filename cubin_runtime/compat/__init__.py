"""Other libraries' function signatures on our operators."""
