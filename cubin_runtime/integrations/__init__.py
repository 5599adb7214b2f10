"""The operators inside other libraries, through interfaces that those libraries publish."""
