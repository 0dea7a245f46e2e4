"""Add adapters that come at run time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "troupe_loras",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("scope", sa.String(64), nullable=False),
        sa.Column("key_hash", sa.String(64), nullable=False),
        sa.Column("scale", sa.Float(53), nullable=False),
        sa.Column("part", sa.String(255), nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at_s", sa.Float(53), nullable=False),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("model", "scope", "name"),
    )
