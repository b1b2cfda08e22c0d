"""Checks of a live SGLang server against the trainer."""
