"""What the project knows of transformers that make pictures: one file a class, or a few of one kind."""
