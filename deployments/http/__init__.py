"""The OpenAI-compatible HTTP API. It knows the ``Service`` protocol and nothing of Ray or of tensors."""
