"""Numbers that a kernel and its twin in PyTorch share. Without imports, because PyTorch computes without Triton."""

LARGEST_K3 = 0.5
"""One token counts for at most this in the mean k3 that sequences are judged by: an outlier must not open the gate."""
LEAST_SPREAD = 1e-6
"""Units with a smaller T K are all kept: their log rho(y) is rounding, with a standard deviation below 0.0015."""
NUM_UPPERS = 32
"""Values of C that a measured bound is chosen from; a kernel adds three numbers per token for each."""
LARGEST_UPPER = 100
"""The largest of them; a C above it truncates hardly any token."""
