"""The only door to hardware: torch's counters, malloc, the driver, and recordings in their place."""
