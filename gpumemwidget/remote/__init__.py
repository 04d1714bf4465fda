"""Record any process, and gather what recorded processes tell."""
