"""The SQL database that replicas of the API share: its tables, its migrations, and how it is opened."""
