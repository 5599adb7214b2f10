"""Other people's names for our operators."""
