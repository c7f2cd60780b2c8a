"""Speed and memory figures: `make bench` runs them side by side and writes benchmarks/results.json."""
