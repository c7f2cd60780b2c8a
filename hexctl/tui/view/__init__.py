"""Snapshot -> lines of toned text. Pure: no Textual, no clock, no environment."""
