"""Calibration to AWQ to a 4-bit checkpoint. Writes intermediates."""
