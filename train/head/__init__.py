"""Draft heads as modules, their losses, their simulated accepted length. Reads no conversations."""
