"""What the project knows of transformers that make clips, some with sound, and pictures as clips of one frame."""
