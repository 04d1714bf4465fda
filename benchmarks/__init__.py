"""What observing costs: ``python -m benchmarks`` measures each target of ours in one run."""
