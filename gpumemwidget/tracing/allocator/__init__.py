"""The allocator's history of a cell, replayed: each block with the line that asked for it."""
