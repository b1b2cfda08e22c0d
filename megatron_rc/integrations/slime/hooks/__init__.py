"""The hooks of slime and miles, which name in a ValueError the flag or field to change."""
