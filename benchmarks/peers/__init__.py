"""Steps of other projects on the same weights."""
