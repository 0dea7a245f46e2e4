"""Recipes, precisions of attention and adapters at run time, through a whole application."""
