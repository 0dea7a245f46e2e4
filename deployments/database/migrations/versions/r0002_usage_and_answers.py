"""Add what keys have used, and answers by their ``Idempotency-Key``."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "troupe_usage",
        sa.Column("key_hash", sa.String(64), primary_key=True),
        sa.Column("replica", sa.String(64), primary_key=True),
        sa.Column("since", sa.Integer, nullable=False),
        sa.Column("num_requests", sa.Integer, nullable=False),
        sa.Column("gpu_s", sa.Float(53), nullable=False),
    )
    op.create_table(
        "troupe_answers",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("lease_until_s", sa.Float(53), nullable=False),
        sa.Column("created_at_s", sa.Float(53), nullable=False),
        sa.Column("num_bytes", sa.Integer, nullable=False),
        sa.Column("answer", sa.LargeBinary),
    )
    op.create_index("ix_troupe_answers_created_at_s", "troupe_answers", ["created_at_s"])
