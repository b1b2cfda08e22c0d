"""The Hugging Face formats: model families, configurations, parameter names, checkpoint files."""
