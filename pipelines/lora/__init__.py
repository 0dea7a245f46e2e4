"""Adapters of the LoRA kind: from files to what is added to a transformer's weights."""
