"""The hooks of slime and miles, one file each; `HOOKS` in the settings says which flag of the host names which hook."""
