"""What observing costs: ``python -m tests.bench`` measures each target of ours in one run."""
