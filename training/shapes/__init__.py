"""Subjects of the small models: scenes, their pictures, their captions, and tokens of these."""
