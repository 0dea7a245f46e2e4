"""Add webhooks of clips, and their deliveries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("troupe_jobs", sa.Column("webhook_json", sa.Text))
    op.create_table(
        "troupe_deliveries",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("not_before_s", sa.Float(53), nullable=False),
        sa.Column("ended_at_s", sa.Float(53)),
    )
    op.create_index("ix_troupe_deliveries_not_before_s", "troupe_deliveries", ["not_before_s"])
