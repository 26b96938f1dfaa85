"""The files of a chain and of checkpoints: read, checked, described and written. Runs no model."""
