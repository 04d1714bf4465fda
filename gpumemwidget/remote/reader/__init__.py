"""Keep what recorded processes tell, and bring it together."""
