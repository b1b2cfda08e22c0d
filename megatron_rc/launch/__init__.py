"""The layout of a job on its machines, and how servers and a job on one machine are started and ended."""
