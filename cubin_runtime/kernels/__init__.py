"""What each kernel family needs: traits, selection, grids and parameter values. No driver is called here."""
