"""The page of a diagnosis: one HTML file that needs no network."""
