"""Policies of the run: admission and staleness, dispatch, drift, memory of killed GPUs. Pure functions of what they are given."""
