"""One forward of published transformers at full size, beside diffusers' own."""
