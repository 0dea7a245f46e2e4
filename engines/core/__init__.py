"""Contracts and plain records shared by engines, strategies, gangs and models. Imports nothing else of engines."""
