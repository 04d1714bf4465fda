"""The walk from names to storages, which runs no code of the user's."""
