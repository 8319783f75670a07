"""What runs under vLLM's interpreter: it imports nothing of ours, and nothing of ours imports it."""
