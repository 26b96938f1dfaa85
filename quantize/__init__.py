"""From calibration by AWQ to a 4-bit checkpoint. Writes intermediates."""
