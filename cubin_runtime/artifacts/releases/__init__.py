"""Operations on whole releases, on top of the library."""
