"""Policies of the run: admission and staleness, dispatch. Pure functions of what they are given."""
