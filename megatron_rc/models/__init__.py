"""What is known about Hugging Face checkpoints: configurations, parameter names, files."""
