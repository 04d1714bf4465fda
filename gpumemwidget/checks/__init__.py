"""Hold a test or a script to what it may take: no growth, no more than a peak."""
