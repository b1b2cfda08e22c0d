"""One file per host codebase; each undoes itself."""
