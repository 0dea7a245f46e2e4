"""Rank actors that live and die together: placement, step scheduling, watching. Only here do engines import Ray."""
