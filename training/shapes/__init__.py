"""What the small models learn to draw: scenes, their pictures, their captions, and tokens of these."""
