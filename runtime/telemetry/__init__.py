"""Telemetry: the node agent (a child process, the only reader of NVML and host figures) and its client."""
