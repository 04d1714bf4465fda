"""Programs of notebooks with and without a leak, which show whether growth is told rightly."""
