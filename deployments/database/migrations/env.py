"""Run migrations on the connection that ``deployments.database.schema`` hands over. Alembic executes this file."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
