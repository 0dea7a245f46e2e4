"""Revisions of the schema. Each only adds: an earlier version that still runs must be able to write."""
