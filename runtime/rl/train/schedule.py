"""What is due at a step, learning rate and checkpoint: pure functions of it, so that a restored trainer goes on exactly."""

from runtime.config.schema import AlgorithmSection


def learning_rate(algorithm: AlgorithmSection, step: int) -> float:
    """Rate of the optimiser step `step` (from 0).

    It rises linearly over `warmup_steps`, then falls linearly from `learning_rate` to `learning_rate_min` over
    `decay_steps` and stays there. Zero steps leave that part out.
    """
    peak, warmup, decay = algorithm.learning_rate, algorithm.warmup_steps, algorithm.decay_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if not decay:
        return peak
    share = min(1.0, (step - warmup) / decay)
    return peak + (algorithm.learning_rate_min - peak) * share


def checkpoint_due(step: int, every: int) -> bool:
    """Whether the state after optimiser step `step` (from 0) becomes a checkpoint."""
    return (step + 1) % every == 0


def most_unsaved(every: int) -> int:
    """Applied steps that are in no complete checkpoint, at most. Each step's own is complete before it is applied; one every n > 1
    steps is written beside the training, at the latest until the next is due: n steps before it was begun, n - 1 since."""
    return 0 if every == 1 else 2 * every - 1
