"""What is computed from chunks: sums and tests that become the evidence, and what each correction would do."""
