"""The schema's revision: new databases get all tables at once, older ones are migrated with alembic."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, text

from deployments.database.tables import Base, ClipRow

HEAD = "0005"
"""The newest revision in ``migrations/versions``."""
MIGRATIONS = Path(__file__).parent / "migrations"
VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
LOCK = 0x74726F757065
"""Number of the advisory lock under which PostgreSQL's schema changes."""


def prepare(connection: Connection) -> None:
    """Create or migrate all tables; replicas that start at the same moment do so one after the other.

    ValueError if the database is of a later version.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # the driver begins none before CREATE and ALTER
    elif connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    tables = set(inspect(connection).get_table_names())
    if ClipRow.__tablename__ not in tables:
        Base.metadata.create_all(connection)
        VERSION.create(connection, checkfirst=True)
        connection.execute(VERSION.delete())
        connection.execute(VERSION.insert().values(version_num=HEAD))
        return
    version = connection.scalar(VERSION.select()) if VERSION.name in tables else None
    if version != HEAD:
        _migrate(connection, version)


def _migrate(connection: Connection, version: str | None) -> None:
    from alembic import command
    from alembic.config import Config

    if version is not None and version > HEAD:
        raise ValueError(
            f"the database has the schema {version}, which is later than {HEAD} of this version of Troupe: install the "
            "version that made it, or put back the copy from before the upgrade"
        )
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
