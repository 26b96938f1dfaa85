"""Several processes that do one thing: which one this is, and what they say to each other."""
