"""The dump of a job: its columns, and what writes them."""
