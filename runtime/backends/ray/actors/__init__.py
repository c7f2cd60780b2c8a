"""The actors of a run. Each is a thin host: identity, log, level and failure here; the work in `runtime.rl`."""
