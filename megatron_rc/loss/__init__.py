"""The policy loss, its scale, and the advantages."""
