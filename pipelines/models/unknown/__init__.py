"""Classes that no file beside this folder knows: whole on one rank, or divided by diffusers' own plan."""
