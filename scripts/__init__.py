"""Programs that are run by hand, from the root of the repository."""
