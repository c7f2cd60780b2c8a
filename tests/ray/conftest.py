"""Fixtures of the Ray tests."""

from ray_world import ray_world

__all__ = ["ray_world"]
