"""The rollout engine that talks to SGLang servers."""
