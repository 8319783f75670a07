"""P-EAGLE Train."""
