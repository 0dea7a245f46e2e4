"""A cluster that grows and shrinks, by discrete events."""
