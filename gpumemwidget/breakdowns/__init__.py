"""A whole device in parts that add up to its total, and the map of its segments."""
