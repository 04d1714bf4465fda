"""Records as text and HTML: all words and all static pictures."""
