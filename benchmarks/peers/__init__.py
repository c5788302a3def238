"""Implementations of Train Less's models in other libraries, the baselines of the benchmarks."""
