"""Words that several reports share."""
