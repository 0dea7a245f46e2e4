"""The command line: ``troupe generate | serve | models | plan | doctor | demo``."""
