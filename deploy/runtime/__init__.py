"""A loaded chain at work: engine, rounds, caches, drafters, devices, members elsewhere."""
