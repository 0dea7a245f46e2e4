"""Hand-ordered steps of models, made of ``engines.fast``."""
