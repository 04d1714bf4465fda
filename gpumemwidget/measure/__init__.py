"""Readings become records: the sampler, its history, the ledger of cells."""
