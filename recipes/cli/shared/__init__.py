"""What several commands ask, show and log."""
