"""The command line: ``troupe generate | serve | models | doctor | demo``."""
