"""LoRA adapters: from files to additions to a transformer's weights."""
