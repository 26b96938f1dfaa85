"""A package of somebody else, which adds a family of decoders and a kind of draft heads."""
