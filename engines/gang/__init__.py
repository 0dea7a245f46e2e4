"""Rank actors that live and die together: placement, step scheduling, watchdog. Only this engine code imports Ray."""
