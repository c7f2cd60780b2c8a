"""Rollout engines. `torch_engine` is our own; importing it imports torch, importing this package does not."""
