"""What the project knows of each transformer class that diffusers' blocks call: mostly data, a file a class."""
