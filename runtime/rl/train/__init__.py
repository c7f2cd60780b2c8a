"""Training: losses, the trainer, its checkpoints and its loop."""
