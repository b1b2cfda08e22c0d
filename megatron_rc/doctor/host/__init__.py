"""Checks of a codebase that is to be patched, and of the flags it is started with."""
