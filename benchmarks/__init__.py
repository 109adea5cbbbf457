"""Benchmarks: programs, each of which prints ratios of ours and a peer in one run."""
