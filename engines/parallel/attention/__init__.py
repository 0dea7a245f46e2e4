"""Attention on one device, and the strategies that share it out: each takes a kernel and returns a kernel."""
