"""Every setting of a job, one file per section."""
