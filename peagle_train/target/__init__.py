"""The target (verifier) model: where it comes from, its sizes, its states and its distribution."""
