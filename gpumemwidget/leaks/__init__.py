"""Find memory that grows from run to run of a cell, or from step to step of a loop, and why."""
