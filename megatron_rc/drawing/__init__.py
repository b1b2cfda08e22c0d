"""Charts as inline SVG, heat maps, and the frame of a page that needs no network."""
