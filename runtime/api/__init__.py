"""Wire types of the control API (pure). One snapshot out, commands in, one error shape."""
