"""Where verified objects are kept."""
