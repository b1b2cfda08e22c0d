"""The hooks of slime and miles; `HOOKS` in the settings says which flag of the host names which hook.

Each takes the host's arguments, with the key megatron_rc. It raises a ValueError where log-probs are missing, or at a
setting that it cannot honour, with the flag or field to change.
"""
