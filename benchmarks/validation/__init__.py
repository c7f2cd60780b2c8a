"""The cost model against measurements that others made: `python -m benchmarks.validation [RAW_FOLDER]`."""
