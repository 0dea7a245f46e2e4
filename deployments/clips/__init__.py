"""Clips that outlive their request and the application: durable records and a runner."""
