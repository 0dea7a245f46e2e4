"""Jobs in diffusers' modular blocks, one step at a time; engines make the transformer's forwards."""
