"""How jobs and servers are placed on machines, started and ended."""
