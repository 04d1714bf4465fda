"""From readings to recorded cells: monitor, sampler, history, ledger, budgets, export."""
