"""Pictures that clients send along: how they are written, what may come, and their pixels."""
