"""Seeds of what a target writes, from that of a recipe."""

import hashlib


def seed_of(seed: int, key: str, number: int) -> int:
    """31 bits that differ between keys and numbers, and are the same in every run."""
    return int(hashlib.sha256(f"{seed}/{key}/{number}".encode()).hexdigest()[:8], 16) >> 1
