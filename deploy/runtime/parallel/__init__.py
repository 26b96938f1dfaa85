"""Models that are divided over several processes: one leads, the others follow its orders."""
