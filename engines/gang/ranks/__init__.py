"""The processes of a gang: where they are placed, how they start and connect, and how they are watched."""
