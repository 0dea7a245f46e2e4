"""What API keys have under way and have used, counted for the whole application."""
