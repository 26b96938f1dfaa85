"""Families of decoders: what each one's config.json means, in a file of its own."""
