"""Real dumps with one planted fault each."""
