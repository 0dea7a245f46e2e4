"""fp8 and int8 for both engines: recorded activations and quantised linear layers."""
