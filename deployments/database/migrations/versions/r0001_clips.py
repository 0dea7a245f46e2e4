"""Bring clips of any version before migrations to the schema of that time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

COLUMNS = (
    sa.Column("key_hash", sa.String(64), nullable=False, server_default=""),
    sa.Column("eta_at_s", sa.Float(53)),
    sa.Column("alike", sa.String(128), nullable=False, server_default=""),
)
"""Columns that early versions lack. Old rows get the default."""


def upgrade() -> None:
    existing = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("troupe_jobs")}
    for column in COLUMNS:
        if column.name not in existing:
            op.add_column("troupe_jobs", column)
