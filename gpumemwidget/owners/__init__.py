"""Who holds which bytes, and their release."""
