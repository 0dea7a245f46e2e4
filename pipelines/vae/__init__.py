"""A pipeline's models, made quicker or smaller where they are: compiled, or decoding in rows."""
