"""Benchmarks: arms side by side in one call, medians and spread."""
