"""Conversations answered again by the target, through this runtime or a server. Trains nothing."""
