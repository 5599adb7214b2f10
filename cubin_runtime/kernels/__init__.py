"""The planning of each kernel family: traits, selection, grids and parameter values. No driver is called here."""
