"""Static pictures: bars, maps of segments, timelines."""
