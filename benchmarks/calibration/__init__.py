"""Calibration of the choice of a decode's launch: the rows, their measurement on a GPU, and the fit."""
