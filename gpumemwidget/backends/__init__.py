"""The one door to hardware: torch's counters, malloc, the driver, and recordings of them."""
