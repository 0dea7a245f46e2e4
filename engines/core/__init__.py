"""Interfaces and records shared by engines, strategies, gangs and models. Imports no other package of engines."""
