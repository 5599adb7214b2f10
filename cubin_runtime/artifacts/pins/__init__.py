"""Which releases are trusted: pins, the user's pin file, signatures."""
