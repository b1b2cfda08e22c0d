"""Log-probs and entropy of sampled tokens, from vocabulary-parallel logits or from hidden states."""
