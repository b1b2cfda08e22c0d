"""Doctor's verdicts on the launch scripts that host codebases ship."""
