"""A chain whose target runs in another process or on another host."""
