"""Training jobs from their settings: one job, a grid of jobs, and the pages that document them."""
