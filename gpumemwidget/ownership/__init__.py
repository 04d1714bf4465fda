"""Find who holds which bytes: the account of owners, the rows of variables, why memory is held."""
