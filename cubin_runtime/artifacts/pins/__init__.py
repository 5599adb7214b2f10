"""The releases that are trusted: pins, the user's pin file, signatures."""
