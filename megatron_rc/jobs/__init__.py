"""Training jobs from their settings: one job, a grid of jobs, the tables that describe them."""
