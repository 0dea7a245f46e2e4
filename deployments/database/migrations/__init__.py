"""Alembic's folder: one file a revision in ``versions``."""
