"""The OpenAI-compatible HTTP API. It knows the ``Studio`` protocol and nothing of Ray or of tensors."""
