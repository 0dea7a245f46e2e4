"""fp8 and int8 for both engines: observed activations, and linear layers in few bits."""
