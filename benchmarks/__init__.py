"""Benchmarks: ``python -m benchmarks.run NAME... [--quick] [--json PATH]``."""
