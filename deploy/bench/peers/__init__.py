"""Other engines with the same weights, each in a process and an environment of its own."""
