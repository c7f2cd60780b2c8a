"""Learning-rate schedule: a pure function of the step, so that a restored trainer goes on exactly."""

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
