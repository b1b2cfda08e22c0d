"""Seeds that follow from what is sampled: no generator state to keep, whatever the layout."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """A 62-bit seed from (job seed, purpose, step, index ...)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2
