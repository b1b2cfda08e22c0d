"""The rollout engine inside the trainer's process, on transformers."""
