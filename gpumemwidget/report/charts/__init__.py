"""Static pictures: bars, maps of segments, timelines, and plotly's figures."""
